"""What weights of 4 and 8 bits and prompts computed in 8 bits bring and cost: python benchmarks/quantization.py MODEL

Against the model's own numbers, in this order:

    speed        time per token of one stream at a context of 512, time of whole prompts; the formats take turns
    perplexity   of the texts in docs/, in windows of 512 tokens
    agreement    share of positions at which the likeliest token is the same after the same tokens
    same tokens  share of 64 greedy tokens before the first other one, of a prompt computed by the one format and a
                 stream continued by the other, as a prefill and a decode node do
    random       agreement and mean KL divergence on the same windows, of a model of the same shape with random weights
                 in bf16: weights that were once rounded to 4 bits, as those of the demo model, lose little when it is
                 done again

One thread. Keep the machine quiet meanwhile.
"""

import argparse
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from pdserve.core.checkpoint import weight_files
from pdserve.core.ids import BlockId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.batch import Decoding, build_batch
from pdserve.engine.engine import FORMATS, MODEL_NUMBERS, Engine
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.engine.step import Row, SampleSpec, Scored, StepPlan

# What a prefill and a decode node may compute with.
PAIRS = (
    (MODEL_NUMBERS, "int8 weights"),
    (MODEL_NUMBERS, "int4 weights"),
    ("int8 compute", MODEL_NUMBERS),
    ("int8 compute", "int4 weights"),
)
WINDOW = 512
PROMPT, OUTPUT = 128, 64
BLOCK_SIZE, NUM_BLOCKS = 32, 96
ALL_BLOCKS = tuple(map(BlockId, range(NUM_BLOCKS)))
GREEDY = SamplingParams()
TEXTS = Path(__file__).parent.parent / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="of each speed; the median counts")
    parser.add_argument("--windows", type=int, default=40, help="how much of the texts is read")
    parser.add_argument("--prompts", type=int, default=40)
    options = parser.parse_args()
    tokens = read_tokens(options.model)
    starts = range(0, len(tokens) - WINDOW + 1, WINDOW)
    windows = [tokens[start : start + WINDOW] for start in starts][: options.windows]
    prompts = [window[:PROMPT] for window in windows][: options.prompts]
    engines = load_all(options.model)
    tell_speed(engines, windows, options.rounds)
    tell_quality(engines, windows)
    tell_greedy(engines, prompts)
    with tempfile.TemporaryDirectory() as folder:
        print("\na model with random weights:")
        tell_quality(load_all(random_model(options.model, Path(folder))), windows)


def read_tokens(model: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.md")))
    return tokenizer.encode(text, add_special_tokens=False).ids


def load_all(model: Path) -> dict[str, Engine]:
    """An engine for each format, all on one pool: each finds there what another has computed."""
    engines = {numbers: Engine.load(model, numbers=numbers) for numbers in FORMATS}
    spec = engines[MODEL_NUMBERS].kv_spec(BLOCK_SIZE)
    pool = KVPool(spec, NUM_BLOCKS, bytearray(buffer_bytes(spec, NUM_BLOCKS)))
    for engine in engines.values():
        engine.attach(pool)
    return engines


def run(engine: Engine, token_ids: list[int], start: int = 0) -> int:
    """The token that follows."""
    row = Row(0, tuple(token_ids), start, ALL_BLOCKS, samples=(SampleSpec(GREEDY, 0),))
    return engine.step(StepPlan(0, (row,))).draws[0][0].token


def tell_speed(engines: dict[str, Engine], windows: list[list[int]], rounds: int) -> None:
    long = [token for window in windows[:4] for token in window]
    print(f"{'ms':16} {'a token':>9} {'of bf16':>9} {'512':>9} {'of bf16':>9} {'2048':>9} {'of bf16':>9}")
    times: dict[str, list[list[float]]] = {numbers: [[], [], []] for numbers in engines}
    for _ in range(rounds):
        for numbers, engine in engines.items():
            times[numbers][1].append(timed(engine, long[:512]))
            steps = [timed(engine, [long[0]], 512 + index) for index in range(33)]
            times[numbers][0].append(median(steps[1:]))
            times[numbers][2].append(timed(engine, long))
    for numbers, columns in times.items():
        cells = []
        for column, own in zip(columns, times[MODEL_NUMBERS], strict=True):
            ratio = median(here / there for here, there in zip(column, own, strict=True))
            cells.append(f"{median(column) * 1e3:9.2f} {ratio:9.2f}")
        print(f"{numbers:16} " + " ".join(cells), flush=True)


def timed(engine: Engine, token_ids: list[int], start: int = 0) -> float:
    began = time.perf_counter()
    run(engine, token_ids, start)
    return time.perf_counter() - began


@dataclass(slots=True)
class Quality:
    losses: list[float]
    agreements: list[float]
    divergences: list[float]


def tell_quality(engines: dict[str, Engine], windows: list[list[int]]) -> None:
    found = {numbers: Quality([], [], []) for numbers in engines}
    for window in windows:
        own = torch.empty(0)
        for numbers, engine in engines.items():
            log_probs = log_probabilities(engine, window)
            own = log_probs if numbers == MODEL_NUMBERS else own
            targets = torch.tensor(window[1:])
            quality = found[numbers]
            quality.losses.append(-float(log_probs[:-1].gather(1, targets[:, None]).mean()))
            quality.agreements.append(float((log_probs.argmax(1) == own.argmax(1)).float().mean()))
            quality.divergences.append(float((own.exp() * (own - log_probs)).sum(1).mean()))
    print(f"\n{len(windows) * WINDOW} tokens      {'perplexity':>12} {'agreement':>12} {'KL, nats':>12}")
    for numbers, quality in found.items():
        perplexity = torch.tensor(mean(quality.losses)).exp()
        print(f"{numbers:16} {perplexity:12.3f} {mean(quality.agreements):12.4f} {mean(quality.divergences):12.5f}")


def log_probabilities(engine: Engine, window: list[int]) -> Tensor:
    """[len(window), vocab_size] of what follows each token"""
    row = Row(0, tuple(window), 0, ALL_BLOCKS, scored=Scored((0,) * len(window), 0))
    spec, model = engine.kv_spec(BLOCK_SIZE), engine.model
    with torch.inference_mode():
        batch = build_batch((row,), spec, torch.device("cpu"), model.min_rows, Decoding.IN_PLACE)
        return model.logits(model.forward(batch, engine._layer_kvs).scored).log_softmax(1)


def tell_greedy(engines: dict[str, Engine], prompts: list[list[int]]) -> None:
    own = [greedy(engines[MODEL_NUMBERS], engines[MODEL_NUMBERS], prompt) for prompt in prompts]
    print(f"\n{'prompt':16} {'stream':16} {'same greedy tokens':>20}")
    for prefill, decode in PAIRS:
        shares = [
            same_at_first(greedy(engines[prefill], engines[decode], prompt), expected) / OUTPUT
            for prompt, expected in zip(prompts, own, strict=True)
        ]
        print(f"{prefill:16} {decode:16} {mean(shares):20.3f}", flush=True)


def greedy(prefill: Engine, decode: Engine, prompt: list[int]) -> list[int]:
    outputs = [run(prefill, prompt)]
    while len(outputs) < OUTPUT:
        outputs.append(run(decode, outputs[-1:], len(prompt) + len(outputs) - 1))
    return outputs


def same_at_first(tokens: list[int], expected: list[int]) -> int:
    return next(
        (index for index, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]), len(tokens)
    )


def random_model(model: Path, folder: Path) -> Path:
    """The same shapes. Outputs of a layer are as large as its inputs, and logits spread by some units."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for path in weight_files(model):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                shape = file.get_slice(name).get_shape()
                if len(shape) == 1:
                    tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
                else:
                    scale = 0.1 if "embed" in name or "lm_head" in name else shape[1] ** -0.5
                    tensors[name] = (torch.randn(shape, generator=generator) * scale).bfloat16()
    for path in model.iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            shutil.copy(path, folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    main()

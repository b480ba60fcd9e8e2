"""Checks the engine on a device against transformers, then a hand-off between two processes: under 5 minutes.

    python benchmarks/gpu_check.py [--device cuda] [--model DIR]

Without --model a tiny random Llama is made. The first part compares greedy tokens in float32 over chunk sizes
and prompt lengths around block edges. In the second a child process computes a prompt and offers its pool; this
process maps it, copies, verifies and decodes. Needs neither ZeroMQ nor a network. Prints one line a check and
step times at the end; the exit code is 1 when anything differs.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from pdserve.cluster.messages import PoolOffer
from pdserve.core.block_hash import BlockHasher
from pdserve.core.ids import BlockHash, BlockId, Epoch
from pdserve.core.sampling import SamplingParams
from pdserve.engine.engine import Engine
from pdserve.engine.kv_pool import KVPool, PoolView, buffer_bytes
from pdserve.engine.step import Row, SampleSpec, Seal, StepPlan
from pdserve.kvtransfer.copying import copy_and_verify
from pdserve.kvtransfer.pull import BlockCopy, Verdict
from pdserve.kvtransfer.shm import PoolMemory, PoolServer, fetch_pool

BLOCK_SIZE = 32
NUM_BLOCKS = 64
NUM_OUTPUTS = 16
LENGTHS = (1, 31, 32, 33, 95, 96, 97, 300)
CHUNKS = (16, 64, 256, 4096)
GREEDY = SamplingParams(max_tokens=NUM_OUTPUTS)
HASHER = BlockHasher(b"gpu_check".ljust(32), BLOCK_SIZE)


class Bench:
    """One engine over one pool in shared memory; runs one sequence at a time."""

    def __init__(self, model_dir: Path, device: str, dtype: str = "float32"):
        self.engine = Engine.load(model_dir, device=device, dtype=dtype)
        spec = self.engine.kv_spec(BLOCK_SIZE)
        self.memory = PoolMemory.create("gpu-check", buffer_bytes(spec, NUM_BLOCKS))
        self.pool = KVPool(spec, NUM_BLOCKS, self.memory.buffer, device)
        self.engine.attach(self.pool)
        self.table = tuple(BlockId(i) for i in reversed(range(NUM_BLOCKS)))

    def prefill(self, prompt: list[int], chunk: int, seals: tuple[Seal, ...] = ()) -> tuple[int, dict[BlockId, int]]:
        """Returns the first token and the checksums of `seals`."""
        for start in range(0, len(prompt), chunk):
            ids = tuple(prompt[start : start + chunk])
            is_last = start + len(ids) == len(prompt)
            row = Row(0, ids, start, self.table, samples=(SampleSpec(GREEDY, 0),) if is_last else ())
            result = self.engine.step(StepPlan(start, (row,), seals if is_last else ()))
        return result.draws[0][0].token, result.checksums

    def decode(self, num_computed: int, token: int, num_outputs: int) -> list[int]:
        outputs = [token]
        while len(outputs) < num_outputs:
            position = num_computed + len(outputs) - 1
            row = Row(0, (outputs[-1],), position, self.table, samples=(SampleSpec(GREEDY, len(outputs)),))
            outputs.append(self.engine.step(StepPlan(position, (row,))).draws[0][0].token)
        return outputs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--offer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.offer:
        asyncio.run(offer_prompt(options.model, options.device))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = options.model or make_tiny_model(Path(scratch))
        wrong = check_parity(model_dir, options.device) + check_hand_off(model_dir, options.device)
        report_times(model_dir, options.device)
    print("all equal" if not wrong else f"{wrong} checks FAILED")
    return 1 if wrong else 0


def make_tiny_model(path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def make_prompt(num_tokens: int, vocab_size: int) -> list[int]:
    rng = random.Random(num_tokens)
    return [rng.randrange(4, vocab_size) for _ in range(num_tokens)]


def oracle(model_dir: Path, device: str) -> dict[int, list[int]]:
    """transformers' greedy tokens in float32 by prompt length."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device).eval()
    tokens = {}
    for num_tokens in LENGTHS:
        ids = torch.tensor([make_prompt(num_tokens, model.config.vocab_size)], device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_OUTPUTS,
            min_new_tokens=NUM_OUTPUTS,
            do_sample=False,
            pad_token_id=0,
        )
        tokens[num_tokens] = out[0, num_tokens:].tolist()
    return tokens


def check_parity(model_dir: Path, device: str) -> int:
    bench, expected, wrong = Bench(model_dir, device), oracle(model_dir, device), 0
    for chunk in CHUNKS:
        for num_tokens in LENGTHS:
            prompt = make_prompt(num_tokens, bench.engine.config.vocab_size)
            token, _ = bench.prefill(prompt, chunk)
            wrong += bench.decode(num_tokens, token, NUM_OUTPUTS) != expected[num_tokens]
        print(f"parity, chunks of {chunk}: {len(LENGTHS)} prompts on {device}, {wrong} differ so far")
    return wrong


async def offer_prompt(model_dir: Path, device: str) -> None:
    """The child: computes one prompt, says where its blocks are, and serves its pool until stdin closes."""
    bench, num_tokens = Bench(model_dir, device), LENGTHS[-1]
    prompt = make_prompt(num_tokens, bench.engine.config.vocab_size)
    hashes = HASHER.hashes(prompt)
    seals = tuple(
        Seal(bench.table[i], block_hash, min(BLOCK_SIZE, num_tokens - i * BLOCK_SIZE))
        for i, block_hash in enumerate(hashes)
    )
    token, checksums = bench.prefill(prompt, 64, seals)
    epoch = Epoch.new()
    async with PoolServer(bench.memory, epoch, NUM_BLOCKS, bench.pool.spec.block_bytes) as server:
        generations = bench.pool.view.generations.tolist()
        blocks = [
            [seal.block_hash.hex(), seal.block_id, generations[seal.block_id], checksums[seal.block_id]]
            for seal in seals
        ]
        offer = {"offer": asdict(server.offer), "epoch": asdict(epoch), "token": token, "blocks": blocks}
        print(json.dumps(offer), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def check_hand_off(model_dir: Path, device: str) -> int:
    num_tokens = LENGTHS[-1]
    command = [sys.executable, __file__, "--offer", "--device", device, "--model", str(model_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        said = json.loads(child.stdout.readline())
        bench = Bench(model_dir, device)
        mapped = fetch_pool(PoolOffer(**said["offer"]), Epoch(**said["epoch"]))
        view = PoolView(bench.pool.spec, NUM_BLOCKS, mapped.buffer)
        view.check_header()
        copies = [
            BlockCopy(BlockHash(bytes.fromhex(name)), BlockId(block_id), generation, checksum, bench.table[i])
            for i, (name, block_id, generation, checksum) in enumerate(said["blocks"])
        ]
        judged = copy_and_verify(view, bench.pool, copies)
        view.release()
        mapped.close()
        child.stdin.close()
    tokens = bench.decode(num_tokens, said["token"], NUM_OUTPUTS)
    right = (
        all(verdict is Verdict.OK for verdict in judged.verdicts) and tokens == oracle(model_dir, device)[num_tokens]
    )
    moved = len(copies) * bench.pool.spec.payload_bytes
    print(
        f"hand-off between two processes: {len(copies)} blocks, {moved} bytes "
        f"in {judged.busy_s * 1e3:.2f} ms, right: {right}"
    )
    return 0 if right else 1


def report_times(model_dir: Path, device: str) -> None:
    bench = Bench(model_dir, device, "auto")
    prompt = make_prompt(300, bench.engine.config.vocab_size)
    prefills, steps = [], []
    for _ in range(5):
        started = time.perf_counter()
        token, _ = bench.prefill(prompt, 4096)
        prefills.append(time.perf_counter() - started)
        started = time.perf_counter()
        bench.decode(300, token, 9)
        steps.append((time.perf_counter() - started) / 8)
    prefill_ms, step_ms = median(prefills) * 1e3, median(steps) * 1e3
    print(f"{bench.engine.dtype}: prefill of 300 tokens {prefill_ms:.1f} ms, decode step {step_ms:.1f} ms")


if __name__ == "__main__":
    sys.exit(main())

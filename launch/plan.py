"""`pdserve plan`: what a model's KV cache takes, and how many requests a memory size holds. Loads no weights."""

from pathlib import Path

from pdserve.cluster.readers import parse_size
from pdserve.core.errors import ConfigError
from pdserve.core.kv_spec import DTYPE_BYTES, PAGE_BYTES, KVSpec
from pdserve.core.model_config import ModelConfig, load_model_config
from pdserve.launch.arguments import make_parser

DESCRIPTION = "Print what a model's KV cache takes, and how many requests fit into a size. No weights are loaded."
USAGE = "pdserve plan [--model DIR] --kv-memory SIZE [--dtype TYPE] [--block-size N]"
CONTEXTS = (512, 2048, 8192, 32768, 131072)


def main(line: list[str]) -> int:
    """Raises ConfigError for a size or dtype that makes no sense, ModelError for a folder that holds no model."""
    parser = make_parser("pdserve plan", DESCRIPTION, USAGE)
    parser.add_argument("--model", metavar="DIR", help="folder of a Hugging Face model (default: the demo model)")
    parser.add_argument(
        "--kv-memory", metavar="SIZE", required=True, help="memory for KV blocks of one node, like 1GiB"
    )
    parser.add_argument("--dtype", metavar="TYPE", help=f"{', '.join(DTYPE_BYTES)} (default: the checkpoint's)")
    parser.add_argument("--block-size", metavar="N", type=int, default=32, help="tokens in a KV block (default: 32)")
    given = parser.parse_line(line)
    config = load_model_config(_folder(given.model))
    dtype = given.dtype or config.dtype
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {dtype}: must be {', '.join(DTYPE_BYTES)}")
    if not 8 <= given.block_size <= 256 or given.block_size % 8:
        raise ConfigError(f"--block-size {given.block_size}: must be a multiple of 8 from 8 to 256")
    try:
        kv_memory = parse_size(given.kv_memory)
    except ValueError as error:
        raise ConfigError(f"--kv-memory {given.kv_memory} {error}") from None
    spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, dtype, given.block_size)
    print(plan(config, spec, kv_memory))
    return 0


def plan(config: ModelConfig, spec: KVSpec, kv_memory: int) -> str:
    """What a person reads. Raises ConfigError when not even two blocks fit."""
    num_blocks = spec.num_blocks_within(kv_memory)
    if num_blocks < 2:
        raise ConfigError(f"--kv-memory {kv_memory} bytes holds {num_blocks} KV blocks of {spec.block_bytes}; 2 needed")
    context = config.max_position_embeddings
    lengths = [length for length in CONTEXTS if length < context] + [context]
    rows = [(f"{length} tokens", f"{num_blocks / spec.num_blocks_for(length):.1f}") for length in lengths]
    return "\n".join(
        [
            f"one token   2 (K and V) x {spec.num_layers} layers x {spec.num_kv_heads} KV heads x {spec.head_dim} "
            f"dimensions x {DTYPE_BYTES[spec.dtype]} bytes ({spec.dtype}) = {spec.token_bytes} bytes",
            f"one block   {spec.block_size} tokens = {spec.payload_bytes} bytes, {spec.block_bytes} in whole pages "
            f"of {PAGE_BYTES}",
            f"the pool    {kv_memory} bytes = {num_blocks} blocks = {num_blocks * spec.block_size} tokens",
            "",
            "prompt + output    requests at once",
            *(f"{length:<18} {count}" for length, count in rows),
        ]
    )


def _folder(given: str | None) -> Path:
    if given is not None:
        return Path(given)
    from pdserve.launch import demo_model

    return demo_model.folder()

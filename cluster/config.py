"""The configuration of each process: one frozen dataclass, read once at start, handed on by part.

    RouterConfig    pdserve router
    PrefillConfig   pdserve prefill
    DecodeConfig    pdserve decode; role "both" makes it a colocated node
    UpConfig        pdserve up, which starts the others

Nothing here changes after the start; what follows from it lives with its owner.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.cluster import fault_spec, readers
from pdserve.cluster.settings import Config, Loaded, hidden_setting, load, rare_setting, setting, settings_of
from pdserve.core.errors import ConfigError

MIB = 1 << 20
ROUTER_ADDRESS = "tcp://127.0.0.1:5757"
DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL = "folder of a Hugging Face model (default: the demo model)"
MAX_MODEL_LEN = "longest prompt + output in tokens (default: the model's)"


POLICY = setting("shortest", readers.choice("fcfs", "shortest"), "which prompt goes first")


KEY_FILE = setting(None, readers.file(), "the cluster's keys, made by `pdserve keygen`")


def _check_keys(knob: str, address: str | None, key_file: Path | None) -> None:
    host = None if address is None else readers.host_of(address)
    if host is not None and not readers.is_loopback(host) and key_file is None:
        raise ConfigError(
            f"--{knob}: {address!r} is not on this machine alone: that needs keys, "
            "make them once with `pdserve keygen FILE` and give all processes --key-file FILE"
        )


@dataclass(frozen=True, slots=True)
class RouterServing:
    model: Path | None = setting(None, readers.folder(), MODEL)
    served_model_name: str | None = setting(
        None, readers.label(), "model name that clients send (default: the folder's)"
    )
    max_model_len: int | None = setting(None, readers.integer(8, 1 << 24), MAX_MODEL_LEN)


@dataclass(frozen=True, slots=True)
class Http:
    host: str = setting("127.0.0.1", readers.bind_host(), "where HTTP clients connect")
    port: int = setting(8000, readers.integer(0, 65535), "its port, 0 for a free one")
    max_body_bytes: int = setting(8 * MIB, readers.size(1024, 1 << 30), "largest request body")
    api_key_file: Path | None = setting(None, readers.file(), "file of the keys that clients must send, one a line")
    allow_unauthenticated: str = setting(
        "off", readers.choice("on", "off"), "on: serve others than this machine without keys"
    )

    def __post_init__(self) -> None:
        if not (readers.is_loopback(self.host) or self.api_key_file or self.allow_unauthenticated == "on"):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines: give clients keys with --api-key-file FILE, "
                "or say --allow-unauthenticated on"
            )


@dataclass(frozen=True, slots=True)
class Control:
    """The control plane. The router tells nodes its times when they say hello."""

    control: str = setting(ROUTER_ADDRESS, readers.bind_address(lowest_port=1), "where nodes connect")
    heartbeat_s: float = setting(0.5, readers.seconds(0.01, 60), "time between two beats to each node")
    lease_s: float = setting(5.0, readers.seconds(0.1, 600), "how long blocks are kept without a beat")
    node_lost_s: float = setting(3.0, readers.seconds(0.1, 600), "silence until a node counts as lost")
    key_file: Path | None = KEY_FILE

    def __post_init__(self) -> None:
        _check_keys("control", self.control, self.key_file)
        for knob, value in (("lease_s", self.lease_s), ("node_lost_s", self.node_lost_s)):
            if value < 2 * self.heartbeat_s:
                raise ConfigError(f"{knob} {value:g} is below two beats of heartbeat_s {self.heartbeat_s:g}")


@dataclass(frozen=True, slots=True)
class Admission:
    max_queued_requests: int = setting(1024, readers.integer(1, 1 << 20), "requests waiting, beyond it 429")
    recovery_attempts: int = rare_setting(3, readers.integer(1, 100), "attempts a request gets when nodes die")
    recovery_grace_s: float = rare_setting(60.0, readers.seconds(0, 3600), "how long its requests wait for a dead node")
    handoff_deadline_s: float = setting(2.0, readers.seconds(0.1, 600), "longest hand-off, then another decode node")
    prefill_policy: str = POLICY
    max_prompt_work_s: float = setting(1.0, readers.seconds(0, 3600), "predicted work that a node is given ahead")
    cooperative_prefill: str = setting("on", readers.choice("on", "off"), "decode nodes compute prompts if sooner")


@dataclass(frozen=True, slots=True)
class Slo:
    """Prompts that can keep the promise are computed before those that cannot any more.

    A step with a prompt beside streams takes at most the promised time per token, without a promise twice theirs.
    """

    ttft_s: float | None = setting(None, readers.seconds(0.001, 3600), "promised time to first token, in seconds")
    tpot_s: float | None = setting(None, readers.seconds(0.001, 3600), "promised time per output token, in seconds")


@dataclass(frozen=True, slots=True)
class NodeServing:
    model: Path | None = setting(None, readers.folder(), MODEL)
    dtype: str = setting("auto", readers.choice(*DTYPES, metavar="TYPE"), "number type: " + ", ".join(DTYPES))
    device: str = setting("cpu", readers.choice("cpu", "cuda"), "what the model runs on")
    max_model_len: int | None = setting(None, readers.integer(8, 1 << 24), MAX_MODEL_LEN)


@dataclass(frozen=True, slots=True)
class Network:
    router: str = setting(ROUTER_ADDRESS, readers.dial_address(), "control address of the router")
    listen: str = setting("tcp://127.0.0.1:0", readers.bind_address(lowest_port=0), "where other nodes connect")
    advertise: str | None = setting(None, readers.dial_address(), "address told to other nodes (default: --listen)")
    transport: str = setting(
        "auto", readers.choice("auto", "shm", "zmq", metavar="HOW"), "how blocks travel: auto, shm (one host), zmq"
    )
    key_file: Path | None = KEY_FILE
    drain_s: float = rare_setting(8.0, readers.seconds(0, 3600), "longest wait on SIGTERM for requests under way")

    def __post_init__(self) -> None:
        if readers.host_of(self.listen) in readers.EVERY_INTERFACE and self.advertise is None:
            raise ConfigError(
                f"--listen: {self.listen!r} is every interface: tell other nodes which one to dial "
                "with --advertise tcp://HOST:PORT"
            )
        for knob in ("router", "listen", "advertise"):
            _check_keys(knob, getattr(self, knob), self.key_file)


@dataclass(frozen=True, slots=True)
class Memory:
    kv_memory: int | None = setting(
        None, readers.size(MIB), "memory for KV blocks (default: 10 % of what is free, at most 1GiB)"
    )
    block_size: int = setting(32, readers.integer(8, 256), "tokens in a KV block, a multiple of 8")

    def __post_init__(self) -> None:
        if self.block_size % 8:
            raise ConfigError(f"block_size {self.block_size} is not a multiple of 8")


@dataclass(frozen=True, slots=True)
class Compute:
    num_threads: int | None = setting(None, readers.integer(1, 1024), "torch threads (default: one a core)")
    cores: tuple[int, ...] | None = setting(None, readers.core_list(), "cores to run on, like 0,2-3 (default: all)")
    batch_invariant: str = rare_setting(
        "off", readers.choice("on", "off"), "on: the same bits whatever else is computed in a step"
    )


@dataclass(frozen=True, slots=True)
class PrefillNumbers:
    """What a prefill node's layers multiply with. Properties are in the words of Facts.compute."""

    compute: str = rare_setting("model", readers.choice("model", "int8"), "int8: prompts sooner, numbers less exact")

    @property
    def own(self) -> str:
        return "model" if self.compute == "model" else f"{self.compute} compute"

    @property
    def accepted(self) -> None:
        """It takes KV from nobody."""


@dataclass(frozen=True, slots=True)
class DecodeNumbers:
    """See PrefillNumbers."""

    weights: str = rare_setting(
        "model",
        readers.choice("model", "int8", "int4", metavar="TYPE"),
        "of the layers: model, int8, int4; less to read",
    )
    accept_compute: str = rare_setting(
        "same",
        readers.choice("same", "model", "int8", metavar="WHOSE"),
        "KV of which prefill nodes: same as own, model, int8 (and model)",
    )

    @property
    def own(self) -> str:
        return "model" if self.weights == "model" else f"{self.weights} weights"

    @property
    def accepted(self) -> tuple[str, ...]:
        """What KV may have been computed with."""
        others = {"same": (), "model": ("model",), "int8": ("model", "int8 compute")}[self.accept_compute]
        return tuple(dict.fromkeys((self.own, *others)))


MAX_STEP_TOKENS = setting(256, readers.integer(1, 1 << 16), "most tokens in one step: the chunk budget")


@dataclass(frozen=True, slots=True)
class PrefillSteps:
    max_step_tokens: int = MAX_STEP_TOKENS
    prefill_policy: str = POLICY


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    max_step_tokens: int = MAX_STEP_TOKENS
    max_running: int = setting(64, readers.integer(1, 4096), "most sequences that run at once")
    prefill_policy: str = POLICY


@dataclass(frozen=True, slots=True)
class Preemption:
    """How sequences yield when a decode node is out of blocks, see decode_node/preemption.py."""

    preemption_mode: str = setting(
        "auto",
        readers.choice("auto", "swap", "recompute", "return", metavar="HOW"),
        "out of KV blocks: auto, swap, recompute, return",
    )
    swap_memory: int | None = rare_setting(
        None, readers.size(0), "memory for swapped blocks (default: a quarter of --kv-memory)"
    )

    def __post_init__(self) -> None:
        if self.preemption_mode == "swap" and self.swap_memory == 0:
            raise ConfigError("--preemption-mode swap needs memory: give it some with --swap-memory")


BATCHING = rare_setting(
    "continuous", readers.choice("continuous", "static"), "static: a batch runs to its end before the next one begins"
)
CHUNKED_PREFILL = rare_setting(
    "on", readers.choice("on", "off"), "off: a prompt is computed in one step, whatever its length"
)
PREFIX_CACHE = rare_setting("on", readers.choice("on", "off"), "off: requests never find each other's blocks")
KV_ALLOCATION = rare_setting(
    "paged", readers.choice("paged", "max-length"), "max-length: a sequence takes --max-model-len at once"
)


@dataclass(frozen=True, slots=True)
class RouterBaseline:
    """How serving was done before, to measure what each step since then brings; each of these is slower."""

    batching: str = BATCHING
    prefix_cache: str = PREFIX_CACHE


@dataclass(frozen=True, slots=True)
class PrefillBaseline:
    """See RouterBaseline."""

    chunked_prefill: str = CHUNKED_PREFILL


@dataclass(frozen=True, slots=True)
class DecodeBaseline:
    """See RouterBaseline."""

    batching: str = BATCHING
    chunked_prefill: str = CHUNKED_PREFILL
    prefix_cache: str = PREFIX_CACHE
    kv_allocation: str = KV_ALLOCATION


@dataclass(frozen=True, slots=True)
class Trials:
    """Faults for tests of a cluster, see cluster/fault_spec.py."""

    enable_faults: str = hidden_setting("off", readers.choice("on", "off"), "on: obey --fault, for tests of a cluster")
    fault: tuple[fault_spec.Fault, ...] | None = hidden_setting(
        None, fault_spec.reader(), "how this node harms itself, and when"
    )

    def __post_init__(self) -> None:
        if self.fault is not None and self.enable_faults != "on":
            faults = ",".join(map(str, self.fault))
            raise ConfigError(f"--fault: {faults!r} harms this node: only with --enable-faults on")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    serving: RouterServing = RouterServing()
    http: Http = Http()
    control: Control = Control()
    admission: Admission = Admission()
    slo: Slo = Slo()
    baseline: RouterBaseline = RouterBaseline()


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    name: str = setting("P0", readers.name(), "this node's name, unique")
    serving: NodeServing = NodeServing()
    network: Network = Network()
    memory: Memory = Memory()
    compute: Compute = Compute()
    numbers: PrefillNumbers = PrefillNumbers()
    steps: PrefillSteps = PrefillSteps()
    baseline: PrefillBaseline = PrefillBaseline()
    trials: Trials = Trials()


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    name: str = setting("D0", readers.name(), "this node's name, unique")
    role: str = setting("decode", readers.choice("decode", "both"), "both: it also prefills")
    serving: NodeServing = NodeServing()
    network: Network = Network()
    memory: Memory = Memory()
    compute: Compute = Compute()
    numbers: DecodeNumbers = DecodeNumbers()
    steps: DecodeSteps = DecodeSteps()
    preemption: Preemption = Preemption()
    baseline: DecodeBaseline = DecodeBaseline()
    trials: Trials = Trials()


@dataclass(frozen=True, slots=True)
class UpConfig:
    """How many nodes `pdserve up` starts. In mode "both" every node is a decode node that prefills too."""

    prefill: int | None = setting(None, readers.integer(1, 64), "prefill nodes (default: 1)")
    decode: int = setting(1, readers.integer(1, 64), "decode nodes; nodes in mode both")
    role_mode: str = setting("split", readers.choice("split", "both"), "one role a node, or both in each")

    def __post_init__(self) -> None:
        if self.role_mode == "both" and self.prefill is not None:
            raise ConfigError(f"--prefill {self.prefill} makes no sense with --role-mode both: use --decode N")

    @property
    def num_prefill(self) -> int:
        """Prefill nodes to start."""
        return 0 if self.role_mode == "both" else (self.prefill or 1)


CONFIGS: dict[str, type] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "up": UpConfig,
}
VARIABLES = frozenset(item.variable for config_class in CONFIGS.values() for item in settings_of(config_class))


def load_config(
    config_class: type[Config],
    flags: Mapping[str, str] | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Loaded[Config]:
    """Read the config of one process; variables of the other processes are known and passed over.

    Raises ConfigError naming the source of the bad value.
    """
    return load(config_class, flags=flags or {}, environ=environ, file=file, known_variables=VARIABLES)

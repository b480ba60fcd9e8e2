"""How long it takes to plan, by how many requests wait: the machines' whole handling of one event, nothing else.

    python benchmarks/planner.py [--num-queued 10 10000] [--num-events 200]

Of a prefill node: the end of a step, with so many prompts that have their blocks, and with so many that wait for
blocks. Of a decode node: the end of a step, with so many requests that wait for blocks. Of the router: a first
token that makes place for one request, with so many in the queue; once with promises. Medians in microseconds.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator

from pdserve.cluster.events import Received
from pdserve.cluster.messages import (
    Capacity,
    Decode,
    Drawn,
    FirstToken,
    Gauges,
    Held,
    Link,
    Prefill,
    Role,
    Sample,
    Send,
)
from pdserve.core.block_hash import BlockHasher, pack_token_ids
from pdserve.core.ids import Epoch, NodeId, RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.core.turns import Policy
from pdserve.decode_node.chunk_budget import ChunkBudget
from pdserve.decode_node.scheduler import DecodeScheduler, Limits
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.planner import Planner
from pdserve.engine.step import Draw, RunStep, StepDone, StepPlan, StepResult
from pdserve.engine.step_cost import StepCost
from pdserve.prefill_node.scheduler import PrefillScheduler
from pdserve.router.dispatcher import Dispatcher
from pdserve.router.events import NodeJoined, Submit
from pdserve.router.ledger import Times
from pdserve.router.record import Record
from pdserve.router.rules import Rules

ROUTER, P0, D0 = NodeId("router"), NodeId("P0"), NodeId("D0")
BLOCK = 32
CHUNK = 256
PROMPT = 100
STEP_S = 0.1
HASHER = BlockHasher(b"f" * 32, BLOCK)


def request_id(number: int) -> RequestId:
    return RequestId(number.to_bytes(16, "little"))


def work(number: int, num_tokens: int) -> tuple:
    """The fields that Prefill and Decode share, of a prompt like no other."""
    prompt = [number % 50_000, number // 50_000] + [7] * (num_tokens - 2)
    hashes = tuple(HASHER.hashes(prompt))
    return request_id(number), 1, pack_token_ids(prompt), (Sample(0, b""),), hashes, SamplingParams(max_tokens=100_000)


def result_of(plan: StepPlan) -> StepDone:
    draws = {row.key: (Draw(1),) for row in plan.rows if row.samples}
    return StepDone(StepResult(plan.step, draws, {seal.block_id: 0 for seal in plan.seals}, STEP_S))


def step_of(actions: list) -> StepPlan:
    return next(action.plan for action in actions if isinstance(action, RunStep))


def run_steps(machine: PrefillScheduler | DecodeScheduler, plan: StepPlan) -> Iterator[float]:
    """Seconds that the machine takes for the end of each step and the plan of the next."""
    for now in itertools.count(1):
        event = result_of(plan)
        start = time.perf_counter()
        actions = machine.handle(event, now * STEP_S)
        yield time.perf_counter() - start
        plan = step_of(actions)


def prefill_steps(num_queued: int, num_blocks: int, deadline_s: float | None = None) -> Iterator[float]:
    """A prompt that never ends in the time, and as many behind it as are said."""
    cost = StepCost()
    planner = Planner(Policy.SHORTEST, CHUNK, cost)
    machine = PrefillScheduler(ROUTER, BlockPool(num_blocks), BLOCK, planner, cost, 1)
    long = 300 * CHUNK
    actions = machine.handle(Received(ROUTER, Prefill(*work(0, long), priority=1)), 0.0)
    for number in range(1, num_queued + 1):
        machine.handle(Received(ROUTER, Prefill(*work(number, PROMPT), deadline_s=deadline_s)), 0.0)
    return run_steps(machine, step_of(actions))


def decode_steps(num_queued: int) -> Iterator[float]:
    """Eight streams that hold the pool, and as many requests that wait for blocks as are said."""
    num_streams, num_blocks = 8, 8 * 320
    budget = ChunkBudget(CHUNK, StepCost())
    machine = DecodeScheduler(ROUTER, BlockPool(num_blocks), HASHER, budget, Limits(num_streams), 1)
    plan = None
    for number in range(num_streams + num_queued):
        fields = (*work(number, PROMPT)[:5], SamplingParams(max_tokens=10_000))
        actions = machine.handle(Received(ROUTER, Decode(*fields, source=None)), 0.0)
        plan = step_of(actions) if plan is None else plan
    assert plan is not None
    return run_steps(machine, plan)


def dispatches(num_queued: int, ttft_s: float | None) -> Iterator[float]:
    """Seconds that the router takes for a first token, and to give its node the next prompt."""
    router = Dispatcher(Rules(ttft_slo_s=ttft_s, cooperative=False))
    gauges = Gauges(1000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0012)
    for node, role in ((P0, Role.PREFILL), (D0, Role.DECODE)):
        capacity = Capacity(1 << 20, BLOCK, 1 << 20, 1 << 20, 1)
        router.handle(NodeJoined(node, role, Epoch(1, 1), capacity, "", HASHER), 0.0)
        router.handle(Received(node, Held(0, (), gauges, (Link(P0),))), 0.0)
    running: list[RequestId] = []
    actions: list = []
    for number in itertools.count():
        while router.num_queued < num_queued:
            record = _record(next(_numbers), 0.01 * number)
            actions += router.handle(Submit(record), 0.01 * number)
        running += [a.message.request for a in actions if isinstance(a, Send) and isinstance(a.message, Prefill)]
        first = FirstToken(running.pop(0), 1, (Drawn(0, 0, 1, None),), 0, 0.0, 0.1)
        event = Received(P0, first)
        start = time.perf_counter()
        actions = router.handle(event, 0.01 * number)
        yield time.perf_counter() - start


_numbers = itertools.count()


def _record(number: int, now: float) -> Record:
    prompt = [number % 50_000, number // 50_000] + [7] * (PROMPT - 2)
    return Record(request_id(number), "", prompt, SamplingParams(), Times(now))


CASES: dict[str, Callable[[int], Iterator[float]]] = {
    "prefill node, step, prompts with blocks": lambda n: prefill_steps(n, 1 << 17),
    "prefill node, step, with promises": lambda n: prefill_steps(n, 1 << 17, deadline_s=1e6),
    "prefill node, step, prompts that wait for blocks": lambda n: prefill_steps(n, 300 * CHUNK // BLOCK),
    "decode node, step, requests that wait for blocks": decode_steps,
    "router, first token and dispatch": lambda n: dispatches(n, None),
    "router, the same with promises": lambda n: dispatches(n, 1e6),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-queued", type=int, nargs="+", default=[10, 10_000])
    parser.add_argument("--num-events", type=int, default=200)
    args = parser.parse_args()
    print("| median us | " + " | ".join(f"{n} queued" for n in args.num_queued) + " | growth |")
    print("|---|" + "---|" * (len(args.num_queued) + 1))
    for name, case in CASES.items():
        medians = []
        for num_queued in args.num_queued:
            seconds = list(itertools.islice(case(num_queued), args.num_events))
            medians.append(1e6 * statistics.median(seconds))
        print(f"| {name} | " + " | ".join(f"{m:.0f}" for m in medians) + f" | {medians[-1] - medians[0]:+.0f} |")


if __name__ == "__main__":
    main()

"""A cluster to which anything may happen, in any order: hypothesis looks for the order that breaks a promise.

Whatever happens, every stream that is read to its end is the model's, no invariant of any machine ever fails, and
once nothing more happens all is over, and nothing held, within what repeats a message and a lease; and the router
knows what every node has cached.
"""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pdserve.cluster.attempts import DEFAULT_LEASE_S
from pdserve.cluster.memory import MemoryHub
from pdserve.cluster.messages import DecodeInbox, Message, PrefillInbox, RouterInbox
from pdserve.core.ids import NodeId, RequestId
from pdserve.decode_node.preemption import Mode
from tests.in_process import BEAT_S, ROUTER, TINY_SPEC, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size
P0, P1, D0, D1 = NODES = tuple(NodeId(name) for name in ("P0", "P1", "D0", "D1"))
LINKS = [(node, ROUTER) for node in NODES] + [(d, p) for d in (D0, D1) for p in (P0, P1)]
TYPES = sorted({*PrefillInbox.__args__, *DecodeInbox.__args__, *RouterInbox.__args__}, key=lambda t: t.__name__)
# Shorter than the router's patience with a node, and than a lease.
MAX_HELD_UP_S, MAX_SILENCE_S = 2.9, 4.4
# The load of one example, computed again from the start.
WORK_S = 5.0


class ClusterMachine(RuleBasedStateMachine):
    @initialize(
        is_remote=st.booleans(),
        cooperative=st.booleans(),
        num_blocks=st.sampled_from([12, 20, 64]),
        max_step_tokens=st.sampled_from([3, 8, 64]),
        block_s=st.sampled_from([0.0002, 0.05]),
        mode=st.sampled_from(Mode),
    )
    def start(
        self,
        is_remote: bool,
        cooperative: bool,
        num_blocks: int,
        max_step_tokens: int,
        block_s: float,
        mode: Mode,
    ) -> None:
        self.cluster = InProcessCluster(
            2,
            2,
            num_blocks=num_blocks,
            max_step_tokens=max_step_tokens,
            hub=MemoryHub(latency_s=0.0001),
            timing=Timing(block=block_s),
            max_attempts=100,
            cooperative=cooperative,
            is_remote=is_remote,
            mode=mode,
            num_swap_blocks=8,
        )
        self.prompts: dict[RequestId, tuple[list[int], int, int]] = {}
        self.stopped: set[tuple[RequestId, int]] = set()
        self.num_scripts = 0

    # ---- requests --------------------------------------------------------------------------------

    @rule(
        stem=st.integers(0, 1),
        num_blocks=st.integers(0, 5),
        extra=st.integers(-1, 1),
        own=st.integers(0, 2),
        max_tokens=st.integers(1, 2 * BLOCK),
        priority=st.integers(0, 1),
        n=st.integers(1, 3),
    )
    def submit(self, stem: int, num_blocks: int, extra: int, own: int, max_tokens: int, priority: int, n: int) -> None:
        """Prompts that share a beginning of any number of blocks, with ends around the edge of one."""
        length = max(1, num_blocks * BLOCK + extra)
        prompt = [1000 * stem + i for i in range(length)]
        prompt[-1] += 100 * own
        self.prompts[self.cluster.submit(prompt, max_tokens, priority, n)] = (prompt, max_tokens, n)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        running = [r for r in self.prompts if not self.cluster.outcomes[r].is_over]
        if running:
            request = data.draw(st.sampled_from(running))
            self.cluster.cancel(request)
            self.cluster.outcomes[request].given_up = "cancelled"

    @rule(data=st.data())
    def stop_sample(self, data: st.DataObject) -> None:
        running = [
            (request, sample)
            for request, (_, _, n) in self.prompts.items()
            if not self.cluster.outcomes[request].is_over
            for sample in range(n)
            if not self.cluster.outcomes[request].is_over
            and self.cluster.records[request].samples[sample].finish is None
        ]
        if running:
            request, sample = data.draw(st.sampled_from(running))
            self.stopped.add((request, sample))
            self.cluster.stop_sample(request, sample)
            if not self.cluster.records[request].live:
                self.cluster.outcomes[request].finish = "stop"

    # ---- faults ----------------------------------------------------------------------------------

    @rule(
        fate=st.sampled_from(["drop", "repeat", "delay"]), message_type=st.sampled_from(TYPES), count=st.integers(1, 3)
    )
    def script(self, fate: str, message_type: type[Message], count: int) -> None:
        hub = self.cluster.hub
        {"drop": hub.drop_next, "repeat": hub.repeat_next, "delay": hub.delay_next}[fate](message_type, count)
        self.num_scripts += 1

    @rule(link=st.sampled_from(LINKS), down_s=st.sampled_from([0.001, 0.3]))
    def reset(self, link: tuple[NodeId, NodeId], down_s: float) -> None:
        self.cluster.reset_link(*link, down_s)

    @rule(node=st.sampled_from(NODES), down_s=st.sampled_from([0.0, 0.002, 1.0]))
    def kill_and_restart(self, node: NodeId, down_s: float) -> None:
        if self.cluster.nodes[node].alive:
            self.cluster.kill(node)
            self.cluster.at(down_s, lambda: self.cluster.restart(node))

    @rule(node=st.sampled_from(NODES), seconds=st.sampled_from([0.01, 0.7, MAX_HELD_UP_S]))
    def hold_up(self, node: NodeId, seconds: float) -> None:
        self.cluster.hold_up(node, seconds)

    @rule(seconds=st.sampled_from([0.6, MAX_SILENCE_S]))
    def silence_router(self, seconds: float) -> None:
        self.cluster.silence_router(seconds)

    @rule(node=st.sampled_from([P0, P1]), block=st.integers(0, 11), bit=st.integers(0, 7))
    def flip(self, node: NodeId, block: int, bit: int) -> None:
        """Of a byte that the fake model does not look at, or it would go on with what it computed from it itself."""
        self.cluster.nodes[node].pool.view.block(block)[5] ^= 1 << bit

    # ---- time ------------------------------------------------------------------------------------

    @rule(num_events=st.integers(1, 40))
    def go_on(self, num_events: int) -> None:
        for _ in range(num_events):
            self.cluster._next_event()

    @rule(seconds=st.sampled_from([0.05, 0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self._run_until_time(self.cluster.now + seconds)

    def _run_until_time(self, end: float) -> None:
        self.cluster.run(until=lambda: self.cluster.now >= end, limit_s=end + 1)

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        # What still befalls a message costs the two beats in which it is missed, and the work.
        limit_s = MAX_SILENCE_S + MAX_HELD_UP_S + DEFAULT_LEASE_S + WORK_S + 2 * BEAT_S * (1 + self.num_scripts)
        cluster.run(limit_s=cluster.now + limit_s)
        for request, (prompt, max_tokens, n) in self.prompts.items():
            outcome = cluster.outcomes[request]
            for sample, tokens in outcome.samples.items():
                assert tokens == continuation(prompt, len(tokens), sample)
            if outcome.given_up is None:
                whole = [sample for sample in range(n) if (request, sample) not in self.stopped]
                assert all(outcome.finishes[sample] == "length" for sample in whole)
                assert all(len(outcome.samples[sample]) == max_tokens for sample in whole)
            else:
                assert outcome.given_up == "cancelled", outcome
        cluster.assert_drained()
        # Whoever is still silent or held up goes on, and then the next beats that arrive tell all.
        self._run_until_time(cluster.now + MAX_SILENCE_S + MAX_HELD_UP_S + BEAT_S * (2 + self.num_scripts))
        cluster.assert_views_agree()


def with_settings(max_examples: int, num_steps: int) -> Callable[[], type]:
    machine = type(ClusterMachine.__name__, (ClusterMachine,), {}).TestCase
    machine.settings = settings(
        max_examples=max_examples,
        stateful_step_count=num_steps,
        derandomize=True,
    )
    return machine


TestAnythingHappens = with_settings(60, 40)
TestAnythingHappensLong = pytest.mark.slow(with_settings(1000, 60))

"""The asyncio edge of the router: links to nodes on one side, streams to the front door on the other.

Feeds the dispatcher with what arrives, executes what it returns, and beats. Owns the endpoint, the
names of links, the streams and the metrics; records and node state belong to the dispatcher. Created
by the router's process entry.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pdserve.cluster.codec import Envelope
from pdserve.cluster.config import Admission, Control, RouterBaseline, Slo
from pdserve.cluster.endpoint import Endpoint, LinkId
from pdserve.cluster.events import Received, Tick
from pdserve.cluster.keys import ClusterKeys
from pdserve.cluster.membership import Admitted, Doorway, Liveness, disagreement
from pdserve.cluster.messages import Facts, Held, Hello, Refused, Role, Send, Welcome, WrongEpoch
from pdserve.core.batching import Batching
from pdserve.core.block_hash import BlockHasher, PrefixCache, root_of
from pdserve.core.ids import Epoch, NodeId, RequestId, new_request_id
from pdserve.core.logprobs import Logprobs
from pdserve.core.sampling import SamplingParams
from pdserve.router.dispatcher import Dispatcher
from pdserve.router.events import (
    Action,
    ClientGone,
    Deliver,
    Event,
    GiveUp,
    NodeJoined,
    NodeLost,
    SampleStopped,
    Submit,
)
from pdserve.router.generation import GenerationError, GenerationRequest, Progress
from pdserve.router.ledger import Times
from pdserve.router.metrics import RouterMetrics
from pdserve.router.overview import overview
from pdserve.router.record import Record, SampleRecord
from pdserve.router.rules import Rules

log = logging.getLogger(__name__)

ROUTER = NodeId("router")
RETRY_AFTER_S = 1


class TokenStream:
    """One request as its reader sees it. What arrives of a sample while nobody reads is merged."""

    def __init__(self, record: Record, service: "RouterService"):
        self.record = record
        self._service = service
        self._pending: dict[int, list[Deliver]] = {}
        self._num_open = len(record.samples)
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[Progress], bool] | None = None
        self._has_second = self._is_told = False

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> Progress:
        while not self._pending:
            if not self._num_open:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            # Once a token and stream: an asyncio.Event takes twice as long.
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        sample = next(iter(self._pending))
        parts = self._pending.pop(sample)
        finish = parts[-1].finish
        self._has_second = self.record.times.second_token is not None
        self._num_open -= finish is not None
        token_ids = [token_id for part in parts for token_id in part.token_ids]
        return Progress(token_ids, finish, sample, Logprobs.join(part.logprobs for part in parts))

    def offer_to(self, sink: Callable[[Progress], bool]) -> None:
        self._sink = sink

    def push(self, action: Deliver) -> None:
        if action.finish is None and self._is_awaited and self._has_taken(action):
            return
        self._pending.setdefault(action.sample, []).append(action)
        self._wake()

    @property
    def _is_awaited(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _has_taken(self, action: Deliver) -> bool:
        if self._sink is None:
            return False
        self._has_second = self.record.times.second_token is not None
        try:
            return self._sink(Progress(list(action.token_ids), None, action.sample, action.logprobs))
        except Exception as error:
            # It is one reader's: whoever brings the tokens has others to bring.
            self.fail(error)
            return True

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self, finish: str = "cancelled") -> None:
        self._service.cancel(self.record, finish)

    def stop(self, sample: int) -> None:
        parts = self._pending.pop(sample, ())
        if not parts or parts[-1].finish is None:
            self._service.stop(self.record, sample)
        self._num_open -= 1

    def prompt_logprobs(self) -> Logprobs:
        return self.record.prompt_logprobs

    def written(self) -> None:
        if not self._is_told:
            self._is_told = self._has_second
            self.record.times.written(self._has_second, time.monotonic())

    def metrics(self) -> dict[str, Any]:
        return self.record.ledger()


class RouterService:
    """facts: the checkpoint and tokenizer that the router itself has loaded."""

    def __init__(
        self,
        control: Control,
        admission: Admission,
        slo: Slo,
        baseline: RouterBaseline,
        facts: Facts,
        max_model_len: int,
        keys: ClusterKeys | None = None,
    ):
        self.epoch = Epoch.new()
        self.metrics = RouterMetrics()
        self._control = control
        self._admission = admission
        self._slo = slo
        self._facts = replace(facts, batching=baseline.batching, prefix_cache=baseline.prefix_cache)
        self._max_model_len = max_model_len
        self._root = root_of(PrefixCache(baseline.prefix_cache))
        self._dispatcher = Dispatcher(Rules.of(admission, slo, Batching(baseline.batching)))
        self._streams: dict[RequestId, TokenStream] = {}
        self._liveness = Liveness(control.heartbeat_s, control.node_lost_s)
        self._endpoint = Endpoint(self.epoch, self._on_frame, self._on_link_lost, keys=keys)
        self._doorway = Doorway(self.epoch, self._endpoint, self._judge, self._welcome)
        self._was_ready = False

    # ---- life ------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Let nodes in and serve until `stop` is set."""
        address = await self._endpoint.listen(self._control.control)
        log.info("control plane on %s, waiting for nodes", address)
        try:
            async with asyncio.TaskGroup() as tasks:
                beats = tasks.create_task(self._beats(), name="beats")
                await stop.wait()
                beats.cancel()
        finally:
            for stream in list(self._streams.values()):
                stream.fail(GenerationError(503, "shutting_down", "the router is stopping", RETRY_AFTER_S))
            await self._endpoint.close()

    async def _beats(self) -> None:
        while True:
            now = time.monotonic()
            for node, silence_s in self._liveness.silent(now):
                self._lose(node, f"silent for {silence_s:.1f} s")
            self._feed(Tick())
            await asyncio.sleep(self._control.heartbeat_s)

    # ---- GenerationService -----------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue a request; its record is made here, its id is never the client's."""
        ready, reason = self._dispatcher.nodes.readiness()
        if not ready:
            raise GenerationError(503, "no_node_ready", f"cannot serve now: {reason}", RETRY_AFTER_S)
        params = self._fitted(request)
        limit = self._admission.max_queued_requests
        if self._dispatcher.num_queued >= limit:
            message = f"{limit} requests are waiting already, the limit that max_queued_requests sets"
            raise GenerationError(429, "rate_limit_exceeded", message, RETRY_AFTER_S)
        record = Record(
            new_request_id(),
            request.label,
            request.prompt_ids,
            params,
            Times(request.arrived_at, request.read_s, request.waited_s),
            priority=request.priority,
            samples=[SampleRecord(index) for index in range(request.num_samples)],
        )
        # Found again when it is dispatched: that this takes its time is part of its way here.
        self._dispatcher.nodes.hashes(record)
        stream = self._streams[record.request] = TokenStream(record, self)
        self._feed(Submit(record))
        return stream

    def stop(self, record: Record, sample: int) -> None:
        if record.request in self._streams:
            self._feed(SampleStopped(record.request, sample))
            if not record.live:
                del self._streams[record.request]
                self._finished(record)

    def cancel(self, record: Record, finish: str) -> None:
        if self._streams.pop(record.request, None) is not None:
            record.finish = finish
            self._feed(ClientGone(record.request))
            self._finished(record)

    def read_wait_s(self) -> float:
        return self._endpoint.read_wait_s()

    def readiness(self) -> tuple[bool, str]:
        return self._dispatcher.nodes.readiness()

    def metrics_text(self) -> bytes:
        return self.metrics.text(self._dispatcher)

    def overview(self) -> dict[str, Any]:
        return overview(self._dispatcher)

    def _fitted(self, request: GenerationRequest) -> SamplingParams:
        """What cannot fit an empty pool is refused, with both numbers; what names no end gets one that fits."""
        prefill_tokens, decode_tokens = self._dispatcher.nodes.largest()
        params, prompt = request.params, len(request.prompt_ids)
        if request.open_ended:
            # The last token drawn is never run, so it needs no slot.
            params = replace(params, max_tokens=max(1, min(params.max_tokens, decode_tokens + 1 - prompt)))
        total = prompt + params.max_tokens - 1
        if request.num_samples > 1:
            self._check_samples(prompt, request.num_samples)
        for what, needed, held in (("prompt", prompt, prefill_tokens), ("prompt and output", total, decode_tokens)):
            if needed > held:
                message = (
                    f"the {what} need KV for {needed} tokens, the largest node holds {held}: "
                    "shorten them or raise --kv-memory of the nodes"
                )
                raise GenerationError(400, "context_length_exceeded", message)
        return params

    def _check_samples(self, num_prompt: int, num_samples: int) -> None:
        """Samples begin side by side, each with a block of its own to write to."""
        widest = self._dispatcher.nodes.widest(num_prompt, num_samples)
        assert widest is not None, "ready without a decode node"
        if num_samples > widest.max_running:
            message = (
                f"n: {num_samples} samples are more than the {widest.max_running} sequences that a decode node runs "
                "at once: ask for fewer or raise --max-running of the nodes"
            )
            raise GenerationError(400, "invalid_value", message)
        needed = widest.blocks_to_begin(num_prompt, num_samples)
        if needed > widest.num_blocks:
            message = (
                f"the prompt and {num_samples} samples need {needed} KV blocks to begin, the largest decode node has "
                f"{widest.num_blocks}: shorten the prompt, ask for fewer or raise --kv-memory of the nodes"
            )
            raise GenerationError(400, "context_length_exceeded", message)

    # ---- frames ----------------------------------------------------------------------------------

    def _on_frame(self, link: LinkId, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, Hello):
            admitted, before = self._doorway.hello(link, envelope, message)
            if before is not None and admitted is not None:
                self._feed(NodeLost(before.node, "another incarnation joined"))
            if admitted is not None:
                self._join(admitted)
        elif not isinstance(message, WrongEpoch):
            sender = self._doorway.sender(link, envelope)
            if sender is not None:
                self._liveness.hear(sender, time.monotonic())
                self._feed(Received(sender, message, self._endpoint.waited_s))
                if isinstance(message, Held):
                    self._announce_readiness()

    def _on_link_lost(self, link: LinkId) -> None:
        node = self._doorway.lost(link)
        if node is not None:
            self._lose(node, "connection lost")

    def _join(self, admitted: Admitted) -> None:
        hello = admitted.hello
        hasher = BlockHasher(hello.facts.kv_fingerprint, hello.capacity.block_size, root=self._root)
        self._liveness.hear(admitted.node, time.monotonic())
        log.info(
            "%s joined as %s: %d KV blocks, %d tokens",
            admitted.node,
            hello.role,
            hello.capacity.num_blocks,
            hello.capacity.num_tokens,
        )
        self._feed(NodeJoined(admitted.node, hello.role, admitted.epoch, hello.capacity, hello.peer_address, hasher))
        self._feed(Tick())

    def _lose(self, node: NodeId, reason: str) -> None:
        log.warning("lost %s: %s", node, reason)
        self._liveness.forget(node)
        self._doorway.drop(node)
        self._feed(NodeLost(node, reason))
        self._announce_readiness()

    def _judge(self, hello: Hello) -> Refused | None:
        if hello.role is Role.ROUTER:
            return Refused("role", "a router cannot join a router")
        if hello.node == ROUTER:
            return Refused("node", f"the name {ROUTER} is the router's own: give the node another --name")
        if hello.capacity.max_model_len < self._max_model_len:
            theirs, ours = hello.capacity.max_model_len, self._max_model_len
            return Refused("max_model_len", f"{theirs} on the node is below {ours} on the router")
        refused = disagreement(self._facts, hello.facts)
        for other in self._doorway.members.values():
            if refused is None and other.node != hello.node:
                refused = disagreement(other.hello.facts, hello.facts)
        return refused

    def _welcome(self) -> Welcome:
        control = self._control
        return Welcome(ROUTER, None, control.heartbeat_s, control.lease_s, control.node_lost_s, self._slo.tpot_s)

    # ---- the machine -----------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        # Whatever this turn of the loop has waited for, it is not what the next message has.
        self._endpoint.read_wait_s()
        for action in self._dispatcher.handle(event, time.monotonic()):
            self._execute(action)

    def _execute(self, action: Action) -> None:
        if isinstance(action, Send):
            if not self._doorway.send(action.peer, action.message):
                log.debug("could not send %s to %s", type(action.message).__name__, action.peer)
            return
        stream = self._streams.get(action.request)
        if stream is None:
            return
        if isinstance(action, Deliver):
            stream.push(action)
            if action.is_last:
                del self._streams[action.request]
                self._finished(stream.record)
        elif isinstance(action, GiveUp):
            del self._streams[action.request]
            stream.record.finish = "error"
            stream.fail(GenerationError(503, "node_failure", action.reason, RETRY_AFTER_S))
            self._finished(stream.record)

    def _finished(self, record: Record) -> None:
        """One log line and one observation a request, however it ended."""
        ledger = record.ledger()
        self.metrics.observe(record)
        log.info(
            "request %s: %d prompt + %d output tokens, TTFT %s, TPOT %s, %s, nodes %s, finish %s%s",
            record.label,
            len(record.prompt),
            record.num_outputs,
            _milliseconds(ledger["ttft_s"]),
            _milliseconds(ledger["tpot_s"]),
            record.plan or "not started",
            "+".join(record.nodes) or "none",
            record.finish,
            f", attempts {record.attempt} ({'; '.join(record.failures)})" if record.failures else "",
        )

    def _announce_readiness(self) -> None:
        ready, reason = self._dispatcher.nodes.readiness()
        if ready != self._was_ready:
            self._was_ready = ready
            log.info("serving" if ready else f"not ready: {reason}")


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"

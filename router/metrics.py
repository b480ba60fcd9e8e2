"""What /metrics shows: the router's histograms and counters, and every node's gauges.

Owned by RouterService. Nodes report their gauges in each beat, so one scrape of the router sees the
whole cluster; the numbers are at most one beat old.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.cluster.messages import Role
from pdserve.router.dispatcher import Dispatcher
from pdserve.router.record import Record

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
TPOT_SECONDS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0)


class NodeGauges(Collector):
    """Gauges of all nodes, read from the dispatcher at scrape time."""

    def __init__(self) -> None:
        self.dispatcher: Dispatcher | None = None

    def collect(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("pdserve_kv_blocks", "KV blocks by state", labels=("node", "role", "state"))
        reserved = GaugeMetricFamily(
            "pdserve_reserved_kv_blocks", "Free or cached KV blocks that are promised", labels=("node", "role")
        )
        running = GaugeMetricFamily("pdserve_running", "Requests being computed", labels=("node", "role"))
        waiting = GaugeMetricFamily("pdserve_waiting", "Requests waiting on a node", labels=("node", "role"))
        leases = GaugeMetricFamily("pdserve_leases", "Leases held on a node", labels=("node", "role"))
        tokens = GaugeMetricFamily(
            "pdserve_queued_tokens", "Tokens to be computed before a node is idle", labels=("node", "role")
        )
        corrupt = CounterMetricFamily(
            "pdserve_corrupt_blocks", "KV blocks that failed verification and were not used", labels=("node", "role")
        )
        yielded = CounterMetricFamily(
            "pdserve_preemptions", "Times that a sequence yielded its KV blocks", labels=("node", "role", "mode")
        )
        swap = GaugeMetricFamily("pdserve_swap_blocks", "Blocks of the host pool by state", labels=("node", "state"))
        known = GaugeMetricFamily(
            "pdserve_known_prefix_blocks",
            "KV blocks that the router takes a node to find by hash",
            labels=("node", "role"),
        )
        queued = GaugeMetricFamily("pdserve_router_queued_requests", "Requests in the router's queue")
        if self.dispatcher is not None:
            queued.add_metric((), self.dispatcher.num_queued)
            for node in self.dispatcher.nodes:
                gauges = node.gauges
                if gauges is None:
                    continue
                labels = (node.node, str(node.role))
                states = {
                    "free": gauges.num_free,
                    "cached": gauges.num_cached,
                    "held": gauges.num_held,
                    "leased": gauges.num_leased,
                }
                for state, value in states.items():
                    blocks.add_metric((*labels, state), value)
                running.add_metric(labels, gauges.num_running)
                waiting.add_metric(labels, gauges.num_waiting)
                leases.add_metric(labels, gauges.num_leases)
                tokens.add_metric(labels, gauges.num_queued_tokens)
                corrupt.add_metric(labels, gauges.num_corrupt)
                known.add_metric(labels, len(node.cache))
                reserved.add_metric(labels, gauges.num_reserved)
                if node.role is not Role.PREFILL:
                    yielded.add_metric((*labels, "swap"), gauges.num_yielded_swap)
                    yielded.add_metric((*labels, "recompute"), gauges.num_yielded_recompute)
                    yielded.add_metric((*labels, "return"), gauges.num_yielded_return)
                    swap.add_metric((node.node, "used"), gauges.num_swapped)
                    swap.add_metric((node.node, "free"), gauges.num_swap_blocks - gauges.num_swapped)
        yield from (blocks, reserved, running, waiting, leases, tokens, corrupt, known, yielded, swap, queued)


class RouterMetrics:
    def __init__(self) -> None:
        # A second sample for every series, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._gauges = NodeGauges()
        self._registry.register(self._gauges)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"pdserve_{name}_seconds", text, buckets=buckets, registry=self._registry)

        self._ttft = histogram("ttft", "From the request's arrival to its first token")
        self._second = histogram("time_to_second_token", "From the request's arrival to its second token")
        self._tpot = histogram("tpot", "Mean time per output token after the first", TPOT_SECONDS)
        self._queue = histogram("queue", "In the router's queue")
        self._prefill_queue = histogram("prefill_queue", "From a node's acceptance of a prompt to its first chunk")
        self._decode_queue = histogram("decode_queue", "From verified blocks to the first decode step")
        self._transfer = histogram("exposed_transfer", "From the first token to all blocks verified")
        self._requests = Counter("pdserve_requests", "Requests by how they ended", ("finish",), registry=self._registry)
        self._prompt = Counter("pdserve_prompt_tokens", "Prompt tokens of ended requests", registry=self._registry)
        self._cached = Counter(
            "pdserve_cached_prompt_tokens",
            "Prompt tokens of ended requests that a prefix cache spared computing, or moving",
            ("spared",),
            registry=self._registry,
        )
        self._output = Counter("pdserve_output_tokens", "Tokens streamed", registry=self._registry)
        self._moved = Counter("pdserve_kv_moved_bytes", "KV bytes pulled between nodes", registry=self._registry)
        self._retries = Counter("pdserve_retries", "Attempts that failed and were repeated", registry=self._registry)

    def observe(self, record: Record) -> None:
        """Count a request that ended."""
        ledger = record.ledger()
        for histogram, name in (
            (self._ttft, "ttft_s"),
            (self._second, "time_to_second_token_s"),
            (self._tpot, "tpot_s"),
            (self._queue, "queue_s"),
            (self._transfer, "exposed_transfer_s"),
        ):
            if ledger[name] is not None:
                histogram.observe(ledger[name])
        for histogram, token, name in (
            (self._prefill_queue, "first_token", "prefill_queue_s"),
            (self._decode_queue, "second_token", "decode_queue_s"),
        ):
            if ledger[token] is not None and name in ledger[token]:
                histogram.observe(ledger[token][name])
        self._requests.labels(record.finish or "unknown").inc()
        self._prompt.inc(len(record.prompt))
        self._cached.labels("computing").inc(record.num_not_computed)
        self._cached.labels("moving").inc(record.num_not_moved)
        self._output.inc(record.num_outputs)
        self._moved.inc(record.bytes_moved)
        self._retries.inc(min(len(record.failures), max(0, record.attempt - 1)))

    def text(self, dispatcher: Dispatcher) -> bytes:
        """Prometheus' text format."""
        self._gauges.dispatcher = dispatcher
        return generate_latest(self._registry)

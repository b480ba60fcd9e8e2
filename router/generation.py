"""The seam between HTTP and dispatching: what the front door asks for, and what it gets back.

The front door (app, api, text) knows JSON and text; the service behind this seam knows tokens only.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pdserve.core.errors import PdserveError
from pdserve.core.logprobs import NO_LOGPROBS, Logprobs
from pdserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue, num_samples times. `label` is the client's own id for logs; it keys nothing.

    arrived_at is the monotonic time at which the HTTP request's handler began, read_s what its body took from
    there, waited_s what the process may have waited for a core before that. With open_ended the client named no
    max_tokens: the one in params is what the context allows, and what the nodes can hold may be less.
    priority: who has the greater one is served first, everywhere.
    """

    prompt_ids: list[int]
    params: SamplingParams
    label: str
    arrived_at: float
    priority: int = 0
    open_ended: bool = False
    num_samples: int = 1
    read_s: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens of a sample not yielded before, in order; more than one when the reader was slower than the model.

    finish is None, or on the sample's last Progress "stop" (a stop id) or "length". A stop id that ended the
    sample is the last of token_ids; whether its text is shown is the front door's choice. logprobs: of each
    of the tokens, where params.logprobs asks for them.
    """

    token_ids: list[int]
    finish: str | None
    sample: int = 0
    logprobs: Logprobs = NO_LOGPROBS


class GenerationError(PdserveError):
    """A request that cannot be served, with the HTTP status and OpenAI error code to tell the client."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: int | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class GenerationStream(Protocol):
    """Iterated at most once, until every sample has finished; an iteration may be given up at any point."""

    def __aiter__(self) -> AsyncIterator[Progress]: ...

    def offer_to(self, sink: Callable[[Progress], bool]) -> None:
        """Before an iteration that waits is woken, `sink` is offered what has come; what it takes is not yielded.

        It is called wherever tokens arrive, and is offered no last Progress. What it raises, the iteration raises.
        """

    def stop(self, sample: int) -> None:
        """The text of this sample is complete: nothing more of it is yielded, the others go on."""

    def prompt_logprobs(self) -> Logprobs:
        """Of every prompt token but the first; there from the first Progress on, where params ask for them."""

    def cancel(self, finish: str = "cancelled") -> None:
        """Stop and free everything held for it on every node; safe at any time, any number of times.

        finish  how the request is counted: "stop" when its text is complete, else nobody reads it any more
        """

    def written(self) -> None:
        """All that was yielded is on its way to the client, who reads it as it comes; for the ledger."""

    def metrics(self) -> dict[str, Any]:
        """Stage durations in seconds and nodes so far, as shown in the final usage event."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the front door must know of the served model."""

    name: str
    max_model_len: int
    vocab_size: int


class GenerationService(Protocol):
    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Queue a request. Raises GenerationError (503 no node ready, 429 full, 400 can never fit)."""

    def read_wait_s(self) -> float:
        """How long a handler that begins now may have waited for a core, at most."""

    def readiness(self) -> tuple[bool, str]:
        """Whether a request would be served now, and the reason in one line."""

    def metrics_text(self) -> bytes:
        """Prometheus text of the router and of every node."""

    def overview(self) -> dict[str, Any]:
        """Every node as the router knows it, as JSON types."""

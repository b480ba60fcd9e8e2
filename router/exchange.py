"""One submitted request on its way to its client: what the service tells of its samples becomes the response.

    Progress of a sample -> its Answer -> Piece -> Reply -> client

Whole or as a stream, the same pieces are made. A sample whose text ends before its tokens do is stopped, the
others go on; the last one that ends ends the request. Made by app for each request, which cancels the generation
whatever happens here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

from aiohttp import HttpVersion11, web

from pdserve.core.logprobs import Logprobs, TokenLogprob
from pdserve.router.answer import Answer, Piece
from pdserve.router.api import Call
from pdserve.router.failure import failure
from pdserve.router.generation import GenerationError, GenerationStream, Progress
from pdserve.router.logprobs import ListedToken, Listing, PromptListing, Run
from pdserve.router.prompt import EncodedPrompt, PromptEncoder
from pdserve.router.reply import NULL, Choice, Reply, encode_json, event

# Small parts of a body are written together; a large one is not copied.
WRITE_BYTES = 1 << 16

EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
JSON_HEADERS = {"Content-Type": "application/json; charset=utf-8"}


@dataclass(frozen=True, slots=True)
class Listings:
    """The shapes of log-probabilities of one endpoint."""

    answer: Listing
    prompt: PromptListing


@dataclass(slots=True)
class _Sample:
    """What a sample has said so far, for an answer that is sent whole."""

    texts: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    finish: str | None = None


class Exchange:
    """answers: of each sample. Sends once, by one of the two `send_`s."""

    def __init__(
        self,
        call: Call,
        prompt: EncodedPrompt,
        answers: Sequence[Answer],
        stream: GenerationStream,
        reply: Reply,
        listings: Listings,
        encoder: PromptEncoder,
    ):
        self._call = call
        self._prompt = prompt
        self._answers = answers
        self._stream = stream
        self._progress = aiter(stream)
        self._reply = reply
        self._listings = listings
        self._encoder = encoder
        self._open = set(range(len(answers)))

    async def send_whole(self, request: web.Request) -> web.StreamResponse:
        """Everything at the end, as one JSON object; raises what the service raises."""
        samples = [_Sample() for _ in self._answers]
        while self._open:
            index, piece = await self._next_piece()
            sample = samples[index]
            sample.texts.append(piece.text)
            if piece.tokens:
                sample.runs.append(self._run(piece.tokens))
            sample.finish = piece.finish
        echo_run = await self._echo_run()
        choices = (self._whole_choice(index, sample, echo_run) for index, sample in enumerate(samples))
        prompt_logprobs = await self._prompt_logprobs()
        parts = self._reply.whole(choices, self._num_tokens, self._stream.metrics(), prompt_logprobs)
        response = web.StreamResponse(headers=JSON_HEADERS)
        await response.prepare(request)
        await _write(response, parts)
        await response.write_eof()
        return response

    async def send_stream(self, request: web.Request) -> web.StreamResponse:
        """Each piece when it is there; a failure up to the first one is raised, a later one is an event."""
        index, piece = await self._next_piece()
        openings = self._openings(await self._echo_run())
        parts: Iterable[bytes] = chain(openings, (self._piece(index, piece),))
        response = web.StreamResponse(headers=EVENT_STREAM_HEADERS)
        if request.version >= HttpVersion11:
            response.enable_chunked_encoding()
        await response.prepare(request)
        if response.chunked and not self._call.stop_strings and not self._call.is_scoring:
            self._stream.offer_to(self._sender(request))
        try:
            # Each write waits while the client is slower than its socket; the service merges tokens meanwhile.
            while self._open:
                await _write(response, parts)
                self._stream.written()
                index, piece = await self._next_piece()
                parts = (self._piece(index, piece),)
            await _write(response, parts)
            self._stream.written()
            # It tells when the last piece was written, so it is made after that.
            parts = (self._reply.closing(self._num_tokens, self._stream.metrics()),)
        except ConnectionError:
            raise
        except Exception as error:
            parts = (event(encode_json(failure(error).body)),)
        await _write(response, parts)
        await response.write_eof()
        return response

    def _sender(self, request: web.Request) -> Callable[[Progress], bool]:
        """Sends a piece where its tokens arrive, while the client keeps up: the handler need not wake for it.

        Only pieces that end nothing, which is all that a request without stop strings has before its last tokens.
        """

        def send(progress: Progress) -> bool:
            transport = request.transport
            if transport is None or transport.is_closing() or transport.get_write_buffer_size():
                return False
            chunk = self._piece(progress.sample, self._answers[progress.sample].push(progress))
            transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            self._stream.written()
            return True

        return send

    @property
    def _num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self._answers)

    async def _next_piece(self) -> tuple[int, Piece]:
        """A sample and the next piece of it; raises GenerationError."""
        try:
            progress = await anext(self._progress)
        except StopAsyncIteration as error:
            raise GenerationError(500, "internal_error", "the generation ended without a finish") from error
        sample = progress.sample
        # What is drawn for a prompt that is only scored is nobody's.
        piece = Piece("", "length") if self._call.is_scoring else self._answers[sample].push(progress)
        if piece.finish is not None:
            self._open.remove(sample)
            if progress.finish is None:
                self._stream.stop(sample)
            if not self._open:
                self._stream.cancel(piece.finish)
        return sample, piece

    def _piece(self, sample: int, piece: Piece) -> bytes:
        logprobs = self._listings.answer.join([self._run(piece.tokens)]) if piece.tokens else NULL
        return self._reply.piece(Choice(sample, piece.text, piece.finish, logprobs))

    def _whole_choice(self, index: int, sample: _Sample, echo_run: Sequence[Run]) -> Choice:
        text = "".join((self._prompt.text, *sample.texts))
        return Choice(index, text, sample.finish, self._listings.answer.join([*echo_run, *sample.runs]))

    def _openings(self, echo_run: Sequence[Run]) -> Iterator[bytes]:
        echo = self._prompt.text if self._call.echo else None
        logprobs = self._listings.answer.join(echo_run)
        return (self._reply.opening(sample, echo, logprobs) for sample in range(len(self._answers)))

    def _run(self, tokens: Sequence[ListedToken]) -> Run:
        return self._listings.answer.run(tokens, self._call.logprobs or 0)

    async def _echo_run(self) -> list[Run]:
        """The prompt's tokens as they are listed before an answer's, once for all samples; none of no echo."""
        if not self._call.echo or self._call.logprobs is None:
            return []
        logprobs = self._stream.prompt_logprobs()
        return [await self._encoder.in_thread(lambda: self._run(_prompt_tokens(self._prompt, logprobs)))]

    async def _prompt_logprobs(self) -> bytes | None:
        num_top = self._call.prompt_logprobs
        if num_top is None:
            return None
        encode, logprobs = self._listings.prompt.encode, self._stream.prompt_logprobs()
        return await self._encoder.in_thread(lambda: encode(_prompt_tokens(self._prompt, logprobs), num_top))


def _prompt_tokens(prompt: EncodedPrompt, logprobs: Logprobs) -> list[ListedToken]:
    """Takes a while for a long prompt with many log-probabilities, so it is made in a worker thread."""
    rows: Iterable[Sequence[TokenLogprob]] = chain(((),), logprobs)
    offsets = prompt.offsets or repeat(0, len(prompt.token_ids))
    columns = zip(prompt.token_ids, rows, offsets, strict=True)
    return [ListedToken(token, row, offset) for token, row, offset in columns]


async def _write(response: web.StreamResponse, parts: Iterable[bytes]) -> None:
    """The parts one after another, none made before those before it are on their way."""
    small: list[bytes] = []
    num_bytes = 0
    for part in parts:
        small.append(part)
        num_bytes += len(part)
        if num_bytes >= WRITE_BYTES:
            await response.write(b"".join(small))
            small, num_bytes = [], 0
    if small:
        await response.write(b"".join(small))

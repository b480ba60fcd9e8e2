"""What can go wrong with a request, in few classes. Record.error has the exact kind; reports count both."""

from collections.abc import Iterable
from enum import StrEnum


class FailureClass(StrEnum):
    HTTP = "HTTP status"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    STREAM = "error in the stream"
    MISSING_END = "missing end"
    SHORT_OUTPUT = "short output"
    LONG_OUTPUT = "long output"
    OTHER = "other"


_CLASSES = {
    "timeout": FailureClass.TIMEOUT,
    "connection": FailureClass.CONNECTION,
    "too_large": FailureClass.STREAM,
    "bad_http": FailureClass.STREAM,
    "bad_event": FailureClass.STREAM,
    "stream_error": FailureClass.STREAM,
    "missing_finish": FailureClass.MISSING_END,
    "missing_done": FailureClass.MISSING_END,
    "short_output": FailureClass.SHORT_OUTPUT,
    "long_output": FailureClass.LONG_OUTPUT,
}


def classify(error: str) -> FailureClass:
    """The class of a Record's error."""
    if error.startswith("http_"):
        return FailureClass.HTTP
    return _CLASSES.get(error, FailureClass.OTHER)


def count_classes(errors: Iterable[str]) -> dict[str, int]:
    """How many errors of each class there are, in the order of FailureClass, those without any left out."""
    counts = dict.fromkeys(FailureClass, 0)
    for error in errors:
        counts[classify(error)] += 1
    return {str(name): count for name, count in counts.items() if count}

"""Bytes of a message and back: msgpack arrays with a closed schema, no maps, no pickle.

    frame   = [version, type name, sender start_ns, sender nonce, addressee start_ns, addressee nonce, fields]
    fields  = one array item per dataclass field, in the order of declaration; nested dataclasses alike

Payloads are no field: they are the frames behind this one, as many as the message says.

The schema is derived once from the annotations in messages.py. Decoding trusts nothing: a version, type,
field count, type, range or size that is not exactly ours raises CodecError and never anything else.
Encoding trusts our own code for ranges; what it lets through, the peer's decode names. Used by the
endpoints and by the in-memory hub.
"""

import math
import types
import typing
from collections.abc import Callable
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any, NoReturn

import msgpack

from pdserve.cluster.messages import PROTOCOL_VERSION, Blocks, Message, Payloads, Probed
from pdserve.core.errors import CodecError
from pdserve.core.ids import BlockHash, Epoch, RequestId

# A prompt of a million tokens is 4 MB, with its block hashes 5 MB.
MAX_FRAME_BYTES = 16 << 20
# The longest tuple is a request's block hashes: a million tokens in blocks of 16. It also bounds what
# hostile nested array headers can make msgpack reserve.
MAX_ITEMS = 65536
MAX_STR_BYTES = 65536

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
# Fields of 64 bits; every other int is a u32. Clients choose seeds, so they may be negative.
INT_RANGES = {
    "block_bytes": (0, U64_MAX),
    "checksum": (0, U64_MAX),
    "credit": (0, U64_MAX),
    "generation": (0, U64_MAX),
    "nonce": (0, U64_MAX),
    "num_bytes": (0, U64_MAX),
    "num_queued_tokens": (0, U64_MAX),
    "priority": (-(2**31), 2**31 - 1),
    "seed": (-(2**63), U64_MAX),
    "since": (0, U64_MAX),
    "start_ns": (0, U64_MAX),
    "until": (0, U64_MAX),
    "whole": (0, U64_MAX),
}
BYTES_LENGTHS = {RequestId: 16, BlockHash: 16}
# Packed u32 token ids and f32 values: readers unpack them without a second check.
PACKED_FIELDS = frozenset({"prompt", "outputs", "token_ids", "values"})

Check = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with the incarnation that sent it and the one it was meant for."""

    sender: Epoch
    addressee: Epoch
    message: Message


def encode(message: Message, sender: Epoch, addressee: Epoch) -> bytes:
    """The frame of a message; raises CodecError when it is too large or holds what no message can."""
    kind = type(message)
    if kind not in MESSAGE_TYPES:
        raise CodecError(f"{kind.__name__} is not a message")
    frame = (
        PROTOCOL_VERSION,
        kind.__name__,
        sender.start_ns,
        sender.nonce,
        addressee.start_ns,
        addressee.nonce,
        message,
    )
    try:
        data: bytes = msgpack.packb(frame, default=_to_fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"{kind.__name__} cannot be encoded: {error}") from error
    if len(data) > MAX_FRAME_BYTES:
        raise CodecError(f"{kind.__name__} of {len(data)} bytes is over the frame limit of {MAX_FRAME_BYTES}")
    return data


def payloads_of(message: Message) -> Payloads:
    """The frames that go behind a message's own."""
    return message.payloads if isinstance(message, Blocks | Probed) else ()


def num_payloads(message: Message) -> int:
    """How many frames a message says that it has behind its own."""
    if isinstance(message, Blocks):
        return len(message.entries)
    return 1 if isinstance(message, Probed) else 0


def decode(data: bytes, payloads: Payloads = ()) -> Envelope:
    """The message of a frame, every field checked, with the frames behind it; raises CodecError saying what was wrong.

    What is in the payloads is not looked at.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise CodecError(f"frame of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        # Lists, not tuples: hostile nested headers reserve room that a list does not touch.
        frame = msgpack.unpackb(
            data,
            use_list=True,
            raw=False,
            strict_map_key=True,
            max_array_len=MAX_ITEMS,
            max_str_len=MAX_STR_BYTES,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        # Its own messages may quote the whole frame.
        raise CodecError(f"frame of {len(data)} bytes is not msgpack of ours: {type(error).__name__}") from error
    if type(frame) is not list or not frame:
        raise CodecError(f"frame is {_describe(frame)}, expected an array")
    version = frame[0]
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise CodecError(f"protocol version {_describe(version)}, this process speaks {PROTOCOL_VERSION}")
    if len(frame) != 7:
        raise CodecError(f"frame has {len(frame)} items, expected 7")
    name = frame[1]
    check = _MESSAGE_CHECKS.get(name) if type(name) is str else None
    if check is None:
        raise CodecError(f"unknown message type {name[:64]!r}" if type(name) is str else "message type is no string")
    sender = _EPOCH_CHECK(frame[2:4])
    addressee = _EPOCH_CHECK(frame[4:6])
    message = check(frame[6])
    expected = num_payloads(message)
    if len(payloads) != expected:
        raise CodecError(f"{name} with {len(payloads)} frames behind it, expected {expected}")
    if payloads:
        message = replace(message, payloads=payloads)
    return Envelope(sender, addressee, message)


def _flatten(union: Any) -> tuple[type, ...]:
    return tuple(typing.get_args(union))


MESSAGE_TYPES: frozenset[type] = frozenset(_flatten(Message))

_GETTERS: dict[type, Callable[[Any], Any]] = {}


def _to_fields(value: Any) -> Any:
    """What msgpack packs in place of a dataclass: its fields in order."""
    getter = _GETTERS.get(type(value))
    if getter is None:
        raise CodecError(f"a message holds a {type(value).__name__}, which has no form on the wire")
    return getter(value)


def _wire_fields(cls: type) -> list[str]:
    hints = typing.get_type_hints(cls)
    return [field.name for field in fields(cls) if hints[field.name] != Payloads]


def _register_getter(cls: type) -> None:
    names = _wire_fields(cls)
    if len(names) == 1:
        (name,) = names
        _GETTERS[cls] = lambda value: (getattr(value, name),)
    else:
        _GETTERS[cls] = attrgetter(*names)


# ---- the schema: one check per annotation, returning the decoded value or raising CodecError ------


def _describe(value: Any) -> str:
    """A value of a stranger in a few words, whatever its size."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str | bytes | list | dict):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"


def _fail(where: str, value: Any, expected: str) -> NoReturn:
    raise CodecError(f"{where} is {_describe(value)}, expected {expected}")


def _compile(annotation: Any, where: str, name: str) -> Check:
    """The check of one annotation. `where` is its path for errors, `name` the field it belongs to."""
    if isinstance(annotation, typing.NewType):
        if annotation in BYTES_LENGTHS:
            return _exact_bytes_check(where, BYTES_LENGTHS[annotation])
        return _compile(annotation.__supertype__, where, name)
    if isinstance(annotation, types.UnionType):
        return _optional_check(annotation, where, name)
    if typing.get_origin(annotation) is tuple:
        item, ellipsis = typing.get_args(annotation)
        if ellipsis is not Ellipsis:
            raise TypeError(f"{where}: only tuple[X, ...] has a form on the wire")
        if item is int:
            return _int_tuple_check(where, *INT_RANGES.get(name, (0, U32_MAX)))
        return _tuple_check(where, _compile(item, where + "[]", name))
    if annotation is int:
        return _int_check(where, *INT_RANGES.get(name, (0, U32_MAX)))
    if annotation is bool:
        return _type_check(where, bool, "true or false")
    if annotation is float:
        return _float_check(where)
    if annotation is str:
        return _type_check(where, str, "a string")
    if annotation is bytes:
        return _packed_check(where) if name in PACKED_FIELDS else _bytes_check(where)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _enum_check(where, annotation)
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _dataclass_check(where, annotation)
    raise TypeError(f"{where}: {annotation!r} has no form on the wire")


def _int_check(where: str, low: int, high: int) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            _fail(where, value, f"an int in {low}..{high}")
        return value

    return check


def _float_check(where: str) -> Check:
    def check(value: Any) -> float:
        if type(value) is int and abs(value) <= 2**53:
            return float(value)
        if type(value) is not float or not math.isfinite(value):
            _fail(where, value, "a finite float")
        return value

    return check


def _type_check(where: str, kind: type, expected: str) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            _fail(where, value, expected)
        return value

    return check


def _bytes_check(where: str) -> Check:
    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) > MAX_STR_BYTES:
            _fail(where, value, f"at most {MAX_STR_BYTES} bytes")
        return value

    return check


def _exact_bytes_check(where: str, length: int) -> Check:
    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) != length:
            _fail(where, value, f"{length} bytes")
        return value

    return check


def _packed_check(where: str) -> Check:
    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) % 4:
            _fail(where, value, "packed items of 4 bytes")
        return value

    return check


def _enum_check(where: str, enum: type[StrEnum]) -> Check:
    members = {member.value: member for member in enum}

    def check(value: Any) -> StrEnum:
        member = members.get(value) if type(value) is str else None
        if member is None:
            _fail(where, value, f"one of {', '.join(members)}")
        return member

    return check


def _optional_check(annotation: Any, where: str, name: str) -> Check:
    inner_types = [arg for arg in typing.get_args(annotation) if arg is not types.NoneType]
    if len(inner_types) != 1:
        raise TypeError(f"{where}: only X | None has a form on the wire")
    inner = _compile(inner_types[0], where, name)

    def check(value: Any) -> Any:
        return None if value is None else inner(value)

    return check


def _tuple_check(where: str, item: Check) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            _fail(where, value, "an array")
        return tuple([item(each) for each in value])

    return check


def _int_tuple_check(where: str, low: int, high: int) -> Check:
    """As _tuple_check of _int_check, without a call per item: token ids are the bulk of the traffic."""

    def check(value: Any) -> tuple[int, ...]:
        if type(value) is not list:
            _fail(where, value, "an array")
        for each in value:
            if type(each) is not int or not low <= each <= high:
                _fail(where + "[]", each, f"an int in {low}..{high}")
        return tuple(value)

    return check


def _dataclass_check(where: str, cls: type) -> Check:
    if "__slots__" not in vars(cls) or hasattr(cls, "__post_init__"):
        raise TypeError(f"{where}: {cls.__name__} needs slots and no __post_init__ to be made from the wire")
    _register_getter(cls)
    hints = typing.get_type_hints(cls)
    wired = [field for field in fields(cls) if hints[field.name] != Payloads]
    empty = [getattr(cls, field.name).__set__ for field in fields(cls) if field not in wired]
    # Slots are set directly: __init__ of a frozen dataclass takes half of all decoding (measured, 64 runs).
    setters = [
        (
            getattr(cls, field.name).__set__,
            _or_default(_compile(hints[field.name], f"{where}.{field.name}", field.name), field),
        )
        for field in wired
    ]
    count = len(setters)

    def check(value: Any) -> Any:
        if type(value) is not list or len(value) != count:
            _fail(where, value, f"an array of {count} fields")
        made: Any = object.__new__(cls)
        for (set_field, each), item in zip(setters, value, strict=True):
            set_field(made, each(item))
        for set_field in empty:
            set_field(made, ())
        return made

    return check


def _or_default(check: Check, field: Field[Any]) -> Check:
    """A dataclass that is a field's default, as log-probabilities of none are, needs no look at its own fields."""
    default = field.default
    if not is_dataclass(default):
        return check
    plain = list(_to_fields(default))
    # 0 equals False.
    kinds = [type(item) for item in plain]

    def check_other(value: Any) -> Any:
        return default if value == plain and [type(item) for item in value] == kinds else check(value)

    return check_other


_MESSAGE_CHECKS: dict[str, Check] = {cls.__name__: _dataclass_check(cls.__name__, cls) for cls in MESSAGE_TYPES}
_EPOCH_CHECK: Check = _dataclass_check("epoch", Epoch)

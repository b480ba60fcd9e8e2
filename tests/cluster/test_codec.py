"""The codec: every message survives the trip, and nothing but a legal message comes out."""

import typing
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from types import NoneType, UnionType

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.cluster import codec
from pdserve.cluster.codec import MAX_FRAME_BYTES, MAX_ITEMS, Envelope, decode, encode
from pdserve.cluster.messages import (
    PROTOCOL_VERSION,
    Blocks,
    Cancel,
    Failed,
    Finish,
    Have,
    HaveEntry,
    Payloads,
    Prefill,
    Stage,
    TokenRun,
    Tokens,
    Want,
)
from pdserve.core.errors import CodecError
from pdserve.core.ids import NO_EPOCH, BlockHash, BlockId, Epoch, RequestId
from pdserve.core.sampling import SamplingParams

REQUEST = RequestId(bytes(range(16)))
HASH = BlockHash(bytes(range(16, 32)))
HERE, THERE = Epoch(1_700_000_000_000_000_000, 2**64 - 1), Epoch(1, 2)
MESSAGES = sorted(codec.MESSAGE_TYPES, key=lambda cls: cls.__name__)

FUZZ = settings(max_examples=150)


def values(annotation, name):
    """Everything the annotation of field `name` allows on the wire."""
    if annotation in codec.BYTES_LENGTHS:
        length = codec.BYTES_LENGTHS[annotation]
        return st.binary(min_size=length, max_size=length)
    if isinstance(annotation, typing.NewType):
        return values(annotation.__supertype__, name)
    if isinstance(annotation, UnionType):
        return st.one_of([st.none() if arg is NoneType else values(arg, name) for arg in typing.get_args(annotation)])
    if typing.get_origin(annotation) is tuple:
        return st.lists(values(typing.get_args(annotation)[0], name), max_size=4).map(tuple)
    if annotation is int:
        low, high = codec.INT_RANGES.get(name, (0, codec.U32_MAX))
        return st.integers(low, high)
    if annotation is bool:
        return st.booleans()
    if annotation is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if annotation is str:
        return st.text(max_size=20)
    if annotation is bytes and name in codec.PACKED_FIELDS:
        return st.binary(max_size=8).map(lambda data: data * 4)
    if annotation is bytes:
        return st.binary(max_size=40)
    if issubclass(annotation, StrEnum):
        return st.sampled_from(annotation)
    assert is_dataclass(annotation)
    hints = typing.get_type_hints(annotation)
    names = [field.name for field in fields(annotation) if hints[field.name] != Payloads]
    made = st.builds(annotation, **{name: values(hints[name], name) for name in names})
    return made.map(with_payloads) if "payloads" in hints else made


def with_payloads(message):
    return replace(message, payloads=tuple(memoryview(bytes([i % 256])) for i in range(codec.num_payloads(message))))


any_message = st.sampled_from(MESSAGES).flatmap(lambda cls: values(cls, ""))
any_epoch = values(Epoch, "")
any_object = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=10,
)


def assert_decodes_or_refuses(data):
    try:
        envelope = decode(data)
    except CodecError:
        return
    assert type(envelope.message) in codec.MESSAGE_TYPES


def make_run(**changes):
    return replace(TokenRun(REQUEST, 1, 0, 7, (1, 2, 3), None), **changes)


def as_lists(message):
    """The frame of a message as nested lists, to be spoilt and packed again."""
    return msgpack.unpackb(encode(message, HERE, THERE))


def refusal(frame):
    with pytest.raises(CodecError) as caught:
        decode(msgpack.packb(frame))
    return str(caught.value)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(max_examples=25)
def test_every_message_comes_out_as_it_went_in(cls, data):
    message = data.draw(values(cls, ""))
    sender, addressee = data.draw(any_epoch), data.draw(any_epoch)
    frame = encode(message, sender, addressee)
    assert decode(frame, codec.payloads_of(message)) == Envelope(sender, addressee, message)


@given(any_message, st.data())
@FUZZ
def test_a_frame_with_changed_bytes_decodes_or_is_refused(message, data):
    frame = bytearray(encode(message, HERE, THERE))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    assert_decodes_or_refuses(bytes(frame))


@given(any_message, st.data())
@FUZZ
def test_a_truncated_frame_is_refused(message, data):
    frame = encode(message, HERE, THERE)
    with pytest.raises(CodecError):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(any_message, st.binary(min_size=1, max_size=8))
@FUZZ
def test_bytes_after_a_frame_are_refused(message, rest):
    with pytest.raises(CodecError):
        decode(encode(message, HERE, THERE) + rest)


@given(st.binary(max_size=200))
@FUZZ
def test_random_bytes_are_refused(data):
    with pytest.raises(CodecError):
        decode(data)


@given(any_message, st.data(), any_object)
@FUZZ
def test_a_frame_with_any_part_replaced_decodes_or_is_refused(message, data, stranger):
    frame = as_lists(message)
    target = frame
    while True:
        index = data.draw(st.integers(0, len(target) - 1))
        if not isinstance(target[index], list) or not target[index] or data.draw(st.booleans()):
            break
        target = target[index]
    target[index] = stranger
    assert_decodes_or_refuses(msgpack.packb(frame))


def test_another_protocol_version_is_refused_naming_both():
    frame = as_lists(Cancel(REQUEST, 1))
    frame[0] = PROTOCOL_VERSION + 1
    assert refusal(frame) == f"protocol version {PROTOCOL_VERSION + 1}, this process speaks {PROTOCOL_VERSION}"
    assert "protocol version" in refusal([PROTOCOL_VERSION + 1, "of another shape"])


def test_an_unknown_message_type_is_refused_by_name():
    frame = as_lists(Cancel(REQUEST, 1))
    frame[1] = "Shutdown"
    assert refusal(frame) == "unknown message type 'Shutdown'"


def test_a_missing_or_extra_field_is_refused():
    frame = as_lists(Cancel(REQUEST, 1))
    assert "expected an array of 3 fields" in refusal([*frame[:-1], frame[-1][:-1]])
    assert "expected an array of 3 fields" in refusal([*frame[:-1], [*frame[-1], 0]])


@pytest.mark.parametrize(
    ("index", "value", "what"),
    [
        (0, bytes(15), "Cancel.request is a bytes of length 15, expected 16 bytes"),
        (0, "0123456789abcdef", "Cancel.request is a str of length 16, expected 16 bytes"),
        (1, True, "Cancel.attempt is True"),
        (1, -1, "Cancel.attempt is -1"),
        (1, 2**32, "Cancel.attempt is 4294967296"),
        (1, 1.0, "Cancel.attempt is 1.0"),
        (1, None, "Cancel.attempt is None"),
    ],
)
def test_a_field_of_a_wrong_type_or_range_is_refused_by_name(index, value, what):
    frame = as_lists(Cancel(REQUEST, 1))
    frame[-1][index] = value
    assert refusal(frame).startswith(what)


def test_token_ids_are_u32_and_checksums_u64():
    frame = as_lists(Tokens((make_run(token_ids=(0, 2**32 - 1)),)))
    frame[-1][0][0][4][1] = 2**32
    assert refusal(frame) == "Tokens.runs[].token_ids[] is 4294967296, expected an int in 0..4294967295"
    have = Have(REQUEST, 1, 0, (HaveEntry(HASH, BlockId(3), 2**64 - 1, 2**64 - 1),))
    assert decode(encode(have, HERE, THERE)).message == have


def test_an_unknown_enum_value_is_refused():
    frame = as_lists(Failed(REQUEST, 1, Stage.PREFILL, "no room"))
    frame[-1][2] = "lunch"
    assert "expected one of prefill, handoff, decode, done" in refusal(frame)


def test_packed_token_ids_must_be_whole():
    message = Prefill(REQUEST, 1, bytes(8), (), (), SamplingParams())
    frame = as_lists(message)
    frame[-1][2] = bytes(7)
    assert refusal(frame) == "Prefill.prompt is a bytes of length 7, expected packed items of 4 bytes"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2**60, "1"])
def test_a_number_that_is_not_finite_is_refused(value):
    frame = as_lists(Prefill(REQUEST, 1, b"", (), (), SamplingParams()))
    frame[-1][-1] = value
    assert "expected a finite float" in refusal(frame)


def test_an_integer_where_a_float_belongs_arrives_as_a_float():
    message = Prefill(REQUEST, 1, b"", (), (), SamplingParams(temperature=1))
    decoded = decode(encode(message, HERE, THERE)).message
    assert type(decoded.sampling.temperature) is float


def test_a_finish_comes_back_as_the_enum_member():
    message = Tokens((make_run(finish=Finish.STOP),))
    assert decode(encode(message, HERE, THERE)).message.runs[0].finish is Finish.STOP


def test_a_tuple_over_the_limit_is_refused():
    legal = Want(REQUEST, 1, 0, (HASH,) * MAX_ITEMS)
    assert len(decode(encode(legal, HERE, THERE)).message.hashes) == MAX_ITEMS
    with pytest.raises(CodecError):
        decode(encode(replace(legal, hashes=(HASH,) * (MAX_ITEMS + 1)), HERE, THERE))


def test_a_frame_over_the_limit_is_refused_on_both_sides():
    message = Prefill(REQUEST, 1, bytes(MAX_FRAME_BYTES), (), (), SamplingParams())
    with pytest.raises(CodecError, match="over the frame limit"):
        encode(message, HERE, THERE)
    with pytest.raises(CodecError, match="over the limit"):
        decode(bytes(MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("depth", [1, 500, 5000])
def test_nested_headers_that_promise_more_than_they_hold_are_refused(depth):
    header = b"\xdd" + (MAX_ITEMS - 1).to_bytes(4, "big")
    with pytest.raises(CodecError):
        decode(header * depth + bytes(MAX_ITEMS))


@pytest.mark.parametrize("message", [None, "Cancel", SamplingParams(), make_run()])
def test_only_messages_can_be_encoded(message):
    with pytest.raises(CodecError, match="is not a message"):
        encode(message, NO_EPOCH, NO_EPOCH)


@pytest.mark.parametrize("attempt", [2**64, object(), 1j])
def test_a_value_with_no_form_on_the_wire_is_refused_by_the_sender(attempt):
    with pytest.raises(CodecError):
        encode(Cancel(REQUEST, attempt), HERE, THERE)


@pytest.mark.parametrize("num_payloads", [0, 1, 3])
def test_blocks_need_a_frame_for_each_entry(num_payloads):
    entry = HaveEntry(HASH, BlockId(1), 1, 1)
    frame = encode(Blocks(REQUEST, 1, 1, (entry, entry)), HERE, THERE)
    with pytest.raises(CodecError, match=f"{num_payloads} frames behind it, expected 2"):
        decode(frame, (memoryview(b"x"),) * num_payloads)


def test_a_frame_behind_any_other_message_is_refused():
    with pytest.raises(CodecError, match="1 frames behind it, expected 0"):
        decode(encode(Tokens((make_run(),)), HERE, THERE), (memoryview(b"x"),))

"""Our dataclasses as plain JSON types and back, by their annotations.

`encode` writes every field; `decode` demands every field that has no default, ignores what it does not know (files
carry derived values for other programs) and names the place of whatever does not fit. A field whose type is a union
of dataclasses carries `kind`, the class's name. Infinite numbers, which JSON lacks, are the strings "inf" and "-inf".
Called by json_file.
"""

import functools
import math
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from pdserve.loadtest.errors import ReportError

_INFINITIES = {"inf": math.inf, "-inf": -math.inf}


def encode(value: Any) -> Any:
    """Plain JSON types. Raises TypeError for a type that no report holds, ValueError for NaN: both are our bugs."""
    if value is None or (isinstance(value, bool | int) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return _encode_float(float(value))
    for kind, write in _WRITERS.items():
        if isinstance(value, kind):
            return write(value)
    if is_dataclass(value):
        written = {field.name: encode(getattr(value, field.name)) for field in fields(value)}
        # Only unions need it, but a class does not know where it is used.
        return {"kind": type(value).__name__, **written}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def decode(annotation: Any, value: Any, where: str) -> Any:
    """The value that `encode` wrote for a field of this annotation. Raises ReportError naming the place."""
    if annotation is Any:
        return value
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(annotation), value, where)
    if origin is tuple:
        return _decode_tuple(get_args(annotation), value, where)
    if origin is dict:
        content = _demand(value, dict, "an object", where)
        item = get_args(annotation)[1]
        return {name: decode(item, part, f"{where}.{name}") for name, part in content.items()}
    if is_dataclass(annotation):
        return _decode_fields(annotation, value, where)
    return _READERS.get(annotation, functools.partial(_read_enum, annotation))(value, where)


def _encode_float(value: float) -> float | str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if math.isnan(value):
        raise ValueError("a report holds no NaN")
    return value


_WRITERS: dict[type, Callable[[Any], Any]] = {
    Enum: lambda value: value.value,
    str: str,
    datetime: lambda value: value.isoformat(),
    Path: str,
    tuple: lambda value: [encode(part) for part in value],
    list: lambda value: [encode(part) for part in value],
    dict: lambda value: {str(name): encode(part) for name, part in value.items()},
}


def _decode_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    if len(options) == 1:
        return decode(options[0], value, where)
    classes = {option.__name__: option for option in options if isinstance(option, type) and is_dataclass(option)}
    if classes and isinstance(value, dict):
        kind = value.get("kind")
        if kind not in classes:
            raise ReportError(f"{where}.kind: is {kind!r:.80}, must be one of {', '.join(sorted(classes))}")
        return _decode_fields(classes[kind], value, where)
    failures = []
    for option in options:
        try:
            return decode(option, value, where)
        except ReportError as error:
            failures.append(str(error))
    raise ReportError(failures[0])


def _decode_tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    parts = _demand(value, list, "a list", where)
    if items[-1] is Ellipsis:
        return tuple(decode(items[0], part, f"{where}[{i}]") for i, part in enumerate(parts))
    if len(parts) != len(items):
        raise ReportError(f"{where}: has {len(parts)} values, must have {len(items)}")
    return tuple(decode(item, part, f"{where}[{i}]") for i, (item, part) in enumerate(zip(items, parts, strict=True)))


def _decode_fields(cls: Any, value: Any, where: str) -> Any:
    content = _demand(value, dict, "an object", where)
    given = {}
    for field, annotation in _fields_of(cls):
        if field.name in content:
            given[field.name] = decode(annotation, content[field.name], f"{where}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ReportError(f"{where}.{field.name}: is missing")
    return cls(**given)


@functools.cache
def _fields_of(cls: Any) -> tuple[tuple[Field[Any], Any], ...]:
    """The fields of a class with their annotations; looked up once, since a report holds thousands of records."""
    hints = get_type_hints(cls)
    return tuple((field, hints[field.name]) for field in fields(cls) if field.init)


def _demand(value: Any, kind: type, words: str, where: str) -> Any:
    if not isinstance(value, kind):
        raise ReportError(f"{where}: is {value!r:.80}, must be {words}")
    return value


def _read_float(value: Any, where: str) -> float:
    if isinstance(value, str) and value in _INFINITIES:
        return _INFINITIES[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ReportError(f"{where}: is {value!r:.80}, must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ReportError(f"{where}: is a number too large to use") from None


def _read_int(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ReportError(f"{where}: is {value!r:.80}, must be a whole number")
    return value


def _read_datetime(value: Any, where: str) -> datetime:
    try:
        return datetime.fromisoformat(_demand(value, str, "a time", where))
    except ValueError:
        raise ReportError(f"{where}: is {value!r:.80}, must be a time like 2026-01-31T12:00:00+00:00") from None


def _read_enum(cls: type[Enum], value: Any, where: str) -> Enum:
    try:
        return cls(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in cls)
        raise ReportError(f"{where}: is {value!r:.80}, must be one of {known}") from None


_READERS: dict[Any, Callable[[Any, str], Any]] = {
    float: _read_float,
    int: _read_int,
    bool: lambda value, where: _demand(value, bool, "true or false", where),
    str: lambda value, where: _demand(value, str, "text", where),
    datetime: _read_datetime,
    Path: lambda value, where: Path(_demand(value, str, "a path", where)),
}

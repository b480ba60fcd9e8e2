"""Typed access to the members of a request's JSON object; every complaint is an ApiError naming the field.

Strict: true is no number, 1.5 and 2.0 are no integers, null counts as absent. A member nobody asked for is
an error too (`refuse_rest`), because a field that is silently ignored is a wrong answer. Used by api and
messages.
"""

import math
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from pdserve.router.api_error import ApiError, invalid, shown


class Fields:
    """One JSON object and the path to it in the body ("" for the body itself)."""

    def __init__(self, members: Mapping[str, Any], path: str = ""):
        self._members = members
        self._path = path
        self._asked: set[str] = set()

    def name(self, key: str) -> str:
        """How the member is called in error messages."""
        return f"{self._path}.{key}" if self._path else key

    def value(self, key: str) -> Any:
        """The member as it is; None when absent or null."""
        self._asked.add(key)
        return self._members.get(key)

    def error(self, key: str, needed: str, code: str = "invalid_value") -> ApiError:
        return invalid(self.name(key), f"{needed} is needed, not {shown(self._members.get(key))}", code)

    def text(self, key: str) -> str | None:
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a string", "invalid_type")
        return value

    def flag(self, key: str) -> bool:
        """False when absent."""
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false", "invalid_type")
        return bool(value)

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"an integer from {low} to {high}", "invalid_type")
        if not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"a number from {low:g} to {high:g}", "invalid_type")
        # The range is checked before the conversion: a huge integer has no float.
        if not low <= value <= high or not math.isfinite(value):
            raise self.error(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def object(self, key: str) -> "Fields | None":
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object", "invalid_type")
        return Fields(value, self.name(key))

    def refuse_rest(self, later: Mapping[str, tuple[Any, ...]], harmless: Collection[str]) -> None:
        """Refuse every member that was not asked for, unless it changes nothing.

        later     fields that are not supported yet -> the values that ask for nothing (null always does)
        harmless  fields that are accepted and have no effect
        """
        for key, value in self._members.items():
            if key in self._asked or key in harmless:
                continue
            if key in later:
                if not _is_one_of(value, later[key]):
                    message = f"{self.name(key)}: {shown(value)} is not supported by this server"
                    raise ApiError(400, "unsupported_parameter", message, self.name(key))
                continue
            close = get_close_matches(key[:64], [*self._asked, *later, *harmless], n=1)
            hint = f"; did you mean {self.name(close[0])}?" if close else ""
            field = self.name(key[:64])
            raise ApiError(400, "unknown_parameter", f"{shown(field)} is not a field of this request{hint}", field)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is None or any(isinstance(value, bool) == isinstance(item, bool) and value == item for item in neutral)

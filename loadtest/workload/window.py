"""The three parts of a run. Only the steady one is judged: before it the server fills up, after it it empties."""

from enum import StrEnum


class Window(StrEnum):
    WARM_UP = "warm-up"
    STEADY = "steady"
    COOL_DOWN = "cool-down"

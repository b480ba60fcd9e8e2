"""What the values of flags must be: each check names the flag, the value and the limit.

Light to import: the command line needs it for help.
"""

import re
import shlex

from pdserve.loadtest.errors import OptionError


def parse_number(flag: str, prefix: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{flag} {prefix}{text}: must be a number") from None


def parse_count(flag: str, text: str) -> int:
    if re.fullmatch(r"-?[0-9]{1,19}", text.strip(), re.ASCII) is None:
        raise OptionError(f"{flag} {text}: must be a whole number of at most 19 digits")
    return int(text)


def check_count(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise OptionError(f"{flag} {value}: must be within {low} and {high}")


def parse_words(flag: str, text: str) -> list[str]:
    """The words of a command line, quoted as for a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise OptionError(f"{flag} {text}: is no command line: {error}") from None

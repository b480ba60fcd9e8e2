"""Settings: dataclass fields that a flag, an environment variable or a TOML file may fill.

A config class is a frozen dataclass whose fields are settings or parts (nested frozen dataclasses of
settings). `load` builds one from flags > environment > file > default and remembers where each value
came from; `dump` writes it back as TOML. Names of settings are unique within a config class: the flag
`--kv-memory`, the variable `PDSERVE_KV_MEMORY` and the key `kv_memory` in its part's table are one
setting. cluster/config.py declares the settings of each process; launch turns them into flags.
"""

import dataclasses
import difflib
import os
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pdserve.cluster.readers import Reader, toml_text
from pdserve.core.errors import ConfigError

Config = TypeVar("Config")

ENV_PREFIX = "PDSERVE_"
# Variables that others own: the test suite, and what Kubernetes sets for a service called "pdserve".
FOREIGN_VARIABLES = re.compile(r"TEST_.*|SERVICE_(HOST|PORT)(_.*)?|PORT_\d+_.*")
DEFAULT = "default"


def setting(default: object, reader: Reader, description: str) -> Any:
    """Declare a field of a config class: its default, how it is read, and its line in the help."""
    return dataclasses.field(default=default, metadata={"reader": reader, "description": description})


def rare_setting(default: object, reader: Reader, description: str) -> Any:
    """The same for what few ever change: the help names its flag, the example file says what it is."""
    return dataclasses.field(default=default, metadata={"reader": reader, "description": description, "rare": True})


def hidden_setting(default: object, reader: Reader, description: str) -> Any:
    """The same for what nobody who serves needs: it is not in the help."""
    return dataclasses.field(default=default, metadata={"reader": reader, "description": description, "hidden": True})


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting. `part` is the table it stands in, "" at the top of the file."""

    part: str
    name: str
    default: object
    reader: Reader
    description: str
    is_hidden: bool = False
    is_rare: bool = False

    @property
    def key(self) -> str:
        return f"{self.part}.{self.name}" if self.part else self.name

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()


def settings_of(config_class: type) -> tuple[Setting, ...]:
    """Every setting of a config class, in order of declaration."""
    hints = typing.get_type_hints(config_class)
    found: list[Setting] = []
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(hints[field.name]):
            found += [dataclasses.replace(inner, part=field.name) for inner in settings_of(hints[field.name])]
        else:
            meta = field.metadata
            seldom = (meta.get("hidden", False), meta.get("rare", False))
            found.append(Setting("", field.name, field.default, meta["reader"], meta["description"], *seldom))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Config]):
    """A config and, by setting name, where each value came from ("--port", "PDSERVE_PORT", "FILE" or "default")."""

    config: Config
    sources: Mapping[str, str]


def load(
    config_class: type[Config],
    *,
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    file: Path | None,
    known_variables: Iterable[str] = (),
) -> Loaded[Config]:
    """Build a config from its four layers. Empty variables count as not set.

    flags            text by setting name, only those given
    known_variables  variables of other processes, no error here

    Raises ConfigError naming the source, the value and what was expected.
    """
    settings = settings_of(config_class)
    _check_variables(environ, {s.variable for s in settings} | set(known_variables))
    tables = _read_file(file, settings) if file else {}
    values: dict[str, dict[str, object]] = {}
    sources: dict[str, str] = {}
    for item in settings:
        value, source = item.default, DEFAULT
        if item.name in flags:
            source = item.flag
            value = _read_text(source, flags[item.name], item.reader)
        elif environ.get(item.variable):
            source = item.variable
            value = _read_text(source, environ[item.variable], item.reader)
        elif item.key in tables:
            source = str(file)
            value = _read_toml(f"{file}: {item.key}", tables[item.key], item.reader)
        values.setdefault(item.part, {})[item.name] = value
        sources[item.name] = source
    return Loaded(_build(config_class, values), sources)


def dump(loaded: Loaded[Any], title: str) -> str:
    """The effective config as TOML that `load` reads back, each line with its source."""
    lines = [f"# {title}: flags > environment > file > default"]
    part = ""
    for item in settings_of(type(loaded.config)):
        if item.part != part:
            part = item.part
            lines += ["", f"[{part}]"]
        owner = getattr(loaded.config, part) if part else loaded.config
        value = getattr(owner, item.name)
        entry = f"# {item.name} =" if value is None else f"{item.name} = {toml_text(value)}"
        lines.append(f"{entry:<44}  # {loaded.sources[item.name]}: {item.description}")
    return "\n".join(lines) + "\n"


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """A sentence's end that offers the nearest word, or nothing when none is near."""
    near = difflib.get_close_matches(word, sorted(words), n=1, cutoff=0.6)
    return f", did you mean {near[0]}?" if near else ""


def _build(config_class: type[Config], values: Mapping[str, Mapping[str, object]]) -> Config:
    hints = typing.get_type_hints(config_class)
    arguments: dict[str, object] = dict(values.get("", {}))
    for part, fields in values.items():
        if part:
            arguments[part] = hints[part](**fields)
    return config_class(**arguments)


def _read_text(source: str, text: str, reader: Reader) -> object:
    try:
        return reader.from_text(text)
    except ValueError as error:
        raise ConfigError(f"{source}: {text!r} {error}") from None


def _read_toml(source: str, value: object, reader: Reader) -> object:
    try:
        return reader.from_toml(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {value!r} {error}") from None


def _check_variables(environ: Mapping[str, str], known: set[str]) -> None:
    for variable in environ:
        if not variable.startswith(ENV_PREFIX) or variable in known:
            continue
        if not FOREIGN_VARIABLES.fullmatch(variable.removeprefix(ENV_PREFIX)):
            raise ConfigError(f"environment: no setting is called {variable}{did_you_mean(variable, known)}")


def _read_file(file: Path, settings: tuple[Setting, ...]) -> dict[str, object]:
    """Values by dotted key. Raises ConfigError for a file that is no TOML or names an unknown key."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--config: cannot read {str(file)!r}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None
    parts = {item.part for item in settings if item.part}
    flat: dict[str, object] = {}
    for key, value in content.items():
        if key in parts and isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    keys = {item.key for item in settings}
    for key, value in flat.items():
        if key in keys:
            continue
        if key in parts:
            raise ConfigError(f"{file}: {key}: {value!r} is not a table, write [{key}] and its keys below")
        raise ConfigError(f"{file}: unknown key {key!r}{did_you_mean(key, keys | parts)}")
    return flat

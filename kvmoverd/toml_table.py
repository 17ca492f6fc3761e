"""One TOML table being read: typed values out, every refusal names the full key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvmoverd.core.errors import ConfigError

SIZE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SIZES = ("lane_floor", "read_rate_max")
"""Keys that are sizes, too: all others have "bytes" in their names."""
DURATION_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
PORT_MAX = 65_535
TEXT_CHARACTERS_MAX = 4096
SOCKET_PATH_BYTES_MAX = 97
"""The kernel takes 107; beside a socket another one may lie, with ".companion" behind its name."""


class Address(NamedTuple):
    """A host and a port; an IPv6 host is kept without brackets, `str` puts them back."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """True for an address that means every interface, which nobody can dial."""
        return self.host in ("0.0.0.0", "::")


class Table:
    """Hands out the values of a table and remembers the keys asked for; `done` refuses all others.

    A default of None makes a key required. All methods raise `ConfigError` with the full key and the value found.
    """

    def __init__(self, values: object, name: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{name} is {_kind(values)}, must be a table")
        self._values = values
        self._name = name
        self._asked: set[str] = set()

    def key(self, name: str) -> str:
        """Full name of a key of this table, for messages."""
        return f"{self._name}.{name}" if self._name else name

    def table(self, name: str) -> Table:
        """A table inside this one; an absent one is empty."""
        return Table(self._take(name, {}), self.key(name))

    def tables(self, name: str, *, count_max: int) -> list[Table]:
        """An array of tables, e.g. `[[peers]]`; an absent one is empty."""
        found = self._take(name, [])
        if not isinstance(found, list):
            raise ConfigError(f"{self.key(name)} is {_kind(found)}, must be an array of tables: [[{self.key(name)}]]")
        if len(found) > count_max:
            raise ConfigError(f"{self.key(name)}[{count_max}]: {len(found)} are given, at most {count_max} can be used")
        return [Table(values, f"{self.key(name)}[{index}]") for index, values in enumerate(found)]

    def text(self, name: str, default: str | None = None, *, pattern: str = ".*", form: str = "text") -> str:
        found = self._text(name, default)
        if len(found) > TEXT_CHARACTERS_MAX or not re.fullmatch(pattern, found):
            raise ConfigError(f"{self.key(name)} is {found[:128]!r}, must be {form}")
        return found

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        found = self._text(name, default)
        if found not in choices:
            allowed = ", ".join(f'"{choice}"' for choice in choices)
            raise ConfigError(f"{self.key(name)} is {found[:128]!r}, must be one of {allowed}")
        return found

    def flag(self, name: str, *, default: bool) -> bool:
        found = self._take(name, default)
        if not isinstance(found, bool):
            raise ConfigError(f"{self.key(name)} is {_kind(found)}, must be true or false")
        return found

    def count(self, name: str, default: int | None, low: int, high: int) -> int:
        found = self._take(name, default)
        if type(found) is not int:
            raise ConfigError(f"{self.key(name)} is {_kind(found)}, must be an integer")
        if not low <= found <= high:
            raise ConfigError(f"{self.key(name)} is {found:,}, must be {low:,} to {high:,}")
        return found

    def fraction(self, name: str, default: float, low: float, high: float) -> float:
        """A decimal number, as a part of one."""
        found = self._take(name, default)
        if type(found) not in (int, float) or not isinstance(found, int | float):
            raise ConfigError(f"{self.key(name)} is {_kind(found)}, must be a decimal number")
        if not low <= found <= high:
            raise ConfigError(f"{self.key(name)} is {found:g}, must be {low:g} to {high:g}")
        return float(found)

    def size_bytes(self, name: str, default: int | None, low: int, high: int) -> int:
        """An integer of bytes, or text with a binary unit such as "64MiB"."""
        found = self._take(name, default)
        size = found if type(found) is int else self._measured(name, found, SIZE_UNITS, r"\d{1,15}")
        if not low <= size <= high:
            raise ConfigError(
                f"{self.key(name)} is {size_text(int(size))}, must be {size_text(low)} to {size_text(high)}"
            )
        return int(size)

    def duration_s(self, name: str, default_s: float, low_s: float, high_s: float) -> float:
        """Seconds, out of text with a unit such as "500ms"; a bare number is refused: nobody can tell what it means."""
        found = self._take(name, duration_text(default_s))
        length_s = self._measured(name, found, DURATION_UNITS_S, r"\d{1,9}(?:\.\d{1,6})?")
        if not low_s <= length_s <= high_s:
            bounds = f"{duration_text(low_s)} to {duration_text(high_s)}"
            raise ConfigError(f"{self.key(name)} is {duration_text(length_s)}, must be {bounds}")
        return length_s

    def address(self, name: str, default: str | None, *, port_min: int) -> Address:
        """`host:port`; an IPv6 host stands in brackets."""
        found = self._text(name, default)
        match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]/]+)):(\d{1,5})", found)
        port = int(match[3]) if match else -1
        if match is None or not port_min <= port <= PORT_MAX:
            raise ConfigError(
                f"{self.key(name)} is {found[:128]!r}, must be HOST:PORT with a port of {port_min} to {PORT_MAX}"
            )
        return Address(match[1] or match[2], port)

    def addresses(self, name: str, *, count_max: int) -> tuple[Address, ...]:
        """An array of `host:port` that can be dialled, none twice; an absent one is empty."""
        texts = self.texts(name, count_max=count_max, pattern=r"\S+", form="HOST:PORT")
        entries = Table({f"{name}[{index}]": text for index, text in enumerate(texts)}, self._name)
        return tuple(entries.address(f"{name}[{index}]", None, port_min=1) for index in range(len(texts)))

    def path(self, name: str, default: str | None, base: Path) -> Path:
        """A path; a relative one starts at `base`."""
        found = self.text(name, default, pattern=r"[^\0]+", form="a path")
        return Path(os.path.normpath(base / found))

    def socket(self, name: str, default: str, base: Path) -> Path:
        """The path of a Unix socket, which the kernel keeps short."""
        path = self.path(name, default, base)
        size_bytes = len(os.fsencode(path))
        if size_bytes > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"{self.key(name)} is {str(path)!r}: {size_bytes} bytes, a Unix socket's path may have "
                f"{SOCKET_PATH_BYTES_MAX}"
            )
        return path

    def texts(self, name: str, *, count_max: int, pattern: str, form: str) -> tuple[str, ...]:
        """An array of text, each entry as `text` has it and none twice; an absent one is empty."""
        found = self._take(name, [])
        if not isinstance(found, list) or len(found) > count_max:
            raise ConfigError(f"{self.key(name)} is {_kind(found)}, must be an array of at most {count_max} texts")
        entries = Table({f"{name}[{index}]": entry for index, entry in enumerate(found)}, self._name)
        texts = tuple(entries.text(f"{name}[{index}]", pattern=pattern, form=form) for index in range(len(found)))
        if len(set(texts)) < len(texts):
            raise ConfigError(f"{self.key(name)} has an entry twice: {', '.join(texts)}")
        return texts

    def names(self, *, count_max: int) -> list[str]:
        """The keys of a table whose keys are names of the user's own."""
        if len(self._values) > count_max:
            raise ConfigError(f"{self._name} has {len(self._values)} entries, at most {count_max} can be used")
        return [str(name) for name in self._values]

    def done(self) -> None:
        """Refuses keys that nobody asked for: a typo must not become a default."""
        unknown = sorted(str(key) for key in self._values if key not in self._asked)
        if unknown:
            known = ", ".join(sorted(self._asked))
            raise ConfigError(f"{self.key(unknown[0])} is unknown; known here: {known}")

    def _take(self, name: str, default: object) -> object:
        self._asked.add(name)
        found = self._values.get(name, default)
        if found is None:
            raise ConfigError(f"{self.key(name)} is missing and has no default")
        return found

    def _text(self, name: str, default: str | None) -> str:
        found = self._take(name, default)
        if not isinstance(found, str):
            raise ConfigError(f"{self.key(name)} is {_kind(found)}, must be text in quotes")
        return found

    def _measured(self, name: str, found: object, units: Mapping[str, float], number: str) -> float:
        text = found if isinstance(found, str) else ""
        match = re.fullmatch(rf"({number}) ?({'|'.join(units)})", text)
        if match is None:
            shown = repr(text[:128]) if text else _kind(found)
            raise ConfigError(f"{self.key(name)} is {shown}, must be a number and a unit in quotes: {', '.join(units)}")
        return float(match[1]) * units[match[2]] if "." in match[1] else int(match[1]) * units[match[2]]


def size_text(size_bytes: int) -> str:
    """Bytes as a person writes them, exact where the number is round.

    >>> size_text(64 << 20), size_text(1000), size_text(1_610_612_736)
    ('64MiB', '1000B', '1536MiB')
    """
    unit = max((unit for unit, factor in SIZE_UNITS.items() if size_bytes % factor == 0), key=SIZE_UNITS.__getitem__)
    return f"{size_bytes // SIZE_UNITS[unit] if size_bytes else 0}{unit if size_bytes else 'B'}"


def duration_text(duration_s: float) -> str:
    """
    >>> duration_text(0.5), duration_text(90.0)
    ('500ms', '90s')
    """
    return f"{duration_s * 1000:g}ms" if duration_s < 1 else f"{duration_s:g}s"


def plain(name: str, value: object) -> object:
    """A value as the file would have it."""
    slots = getattr(type(value), "__dataclass_fields__", None)
    if slots is not None:
        return {_key(field): plain(field, getattr(value, field)) for field in slots}
    if isinstance(value, Mapping):
        return {key: plain(key, entry) for key, entry in value.items()}
    if isinstance(value, tuple) and not isinstance(value, Address):
        return [plain(name, entry) for entry in value]
    if ("bytes" in name.split("_") or name in SIZES) and isinstance(value, int | float):
        return size_text(int(value))
    if isinstance(value, float) and _key(name) != name:
        return duration_text(value)
    if name == "mode":
        return f"{value:04o}"
    return str(value) if isinstance(value, Path | Address) else value


def _key(field: str) -> str:
    """Of a field, in the file: durations bear their unit in their text there, rates in their names."""
    return field if field.endswith("_per_s") else field.removesuffix("_s")


def _kind(found: object) -> str:
    names = {
        str: "text",
        bool: "a boolean",
        int: "an integer",
        float: "a decimal number",
        list: "an array",
        dict: "a table",
    }
    name = names.get(type(found), "a date or time")
    return f"{name} ({found!r})"[:160] if isinstance(found, str | int | float) else name

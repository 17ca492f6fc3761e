"""Settings of a systemd unit, read from its files as systemd would: the first main file, then all drop-ins."""

from __future__ import annotations

from collections.abc import Mapping

from kvmoverd.adapters.sysfs.tree import Tree

_DIRECTORIES = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
UNLIMITED = "infinity"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50, "E": 1 << 60}


def unit_settings(tree: Tree, unit: str) -> tuple[str, Mapping[str, str]] | None:
    """Path of the unit's file, and its [Service] settings; None where it is not installed. Raises `UnreadableError`."""
    main = next((path for home in _DIRECTORIES if tree.exists(path := f"{home}/{unit}")), None)
    if main is None:
        return None
    drop_ins: dict[str, str] = {}
    for home in reversed(_DIRECTORIES):
        drop_ins |= {
            name: f"{home}/{unit}.d/{name}" for name in tree.names(f"{home}/{unit}.d") if name.endswith(".conf")
        }
    settings: dict[str, str] = {}
    for path in (main, *(drop_ins[name] for name in sorted(drop_ins))):
        settings |= _section(tree.lines(path), "[Service]")
    return main, settings


def default_limits(tree: Tree) -> Mapping[str, str]:
    """What `DefaultLimit...` of the manager's own files says. Raises `UnreadableError`."""
    found: dict[str, str] = {}
    names = [f"/etc/systemd/system.conf.d/{name}" for name in tree.names("/etc/systemd/system.conf.d")]
    for path in ("/etc/systemd/system.conf", *names):
        found |= _section(tree.lines(path), "[Manager]")
    return {name.removeprefix("Default"): text for name, text in found.items() if name.startswith("DefaultLimit")}


def _section(lines: list[str], wanted: str) -> dict[str, str]:
    """The last word of each setting; an empty one stays, as it takes back what was said before."""
    section, found = "", dict[str, str]()
    for line in lines:
        text = line.strip()
        if text.startswith("["):
            section = text
        elif section == wanted and "=" in text and text[0] not in "#;":
            name, _, value = text.partition("=")
            found[name.strip()] = value.strip()
    return found


def amount(text: str) -> int | None:
    """Soft limit of "infinity" (None), "8M", or "1024:524288".

    >>> amount("infinity"), amount("8M"), amount("1024:524288"), amount("64GiB")
    (None, 8388608, 1024, 68719476736)
    """
    soft = text.partition(":")[0].strip()
    digits = soft.rstrip("BiKMGTPE")
    if not digits.isdecimal():
        return None
    return int(digits) * _UNITS.get(soft[len(digits) : len(digits) + 1], 1)


def is_true(text: str) -> bool:
    return text.lower() in ("1", "yes", "true", "on")

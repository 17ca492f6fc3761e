"""What a process may do and have, as /proc and the control groups say it."""

from __future__ import annotations

from collections.abc import Iterator

from kvmoverd.adapters.sysfs.tree import Tree

UNLIMITED = -1
_CAPABILITIES = {"IPC_LOCK": 14, "SYS_PTRACE": 19}
_ALL_USERS = ["0", "0", "4294967295"]
_GROUPS = "/sys/fs/cgroup"
_V1_UNLIMITED = 1 << 60
"""Version 1 says "no limit" as the largest number of whole pages."""


def limits(tree: Tree, name: str) -> tuple[int, int] | None:
    """Soft and hard limit of this process, `UNLIMITED` for none; `name` as in /proc: "Max locked memory"."""
    for line in tree.lines("/proc/self/limits"):
        if line.startswith(name):
            soft, hard = line.removeprefix(name).split()[:2]
            return _limit(soft), _limit(hard)
    return None


def _limit(word: str) -> int:
    return int(word) if word.isdecimal() else UNLIMITED


def status_field(tree: Tree, name: str) -> str:
    """A line of /proc/self/status; empty where it is not there."""
    found = (line.partition(":")[2].strip() for line in tree.lines("/proc/self/status") if line.startswith(f"{name}:"))
    return next(found, "")


def has_capability(tree: Tree, name: str) -> bool:
    """ "IPC_LOCK" or "SYS_PTRACE", in effect. The root of a container's own user namespace has them in name only."""
    word = status_field(tree, "CapEff")
    everybody = (tree.text("/proc/self/uid_map") or "").split() in ([], _ALL_USERS)
    return bool(word) and everybody and bool(int(word, 16) >> _CAPABILITIES[name] & 1)


def group_directories(tree: Tree, controller: str) -> Iterator[str]:
    """Of the control groups that this process is in, the innermost first, of both versions."""
    for line in tree.lines("/proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            bases = (_GROUPS, f"{_GROUPS}/unified")
        elif controller in controllers.split(","):
            bases = (f"{_GROUPS}/{controllers}", f"{_GROUPS}/{controller}")
        else:
            continue
        base = next((base for base in bases if tree.exists(base)), None)
        while base is not None:
            yield f"{base}{path}".rstrip("/")
            if path in ("", "/"):
                break
            path = path.rpartition("/")[0]


def group_limit(tree: Tree, controller: str, names: tuple[str, ...]) -> tuple[int, str] | None:
    """The least limit of all groups, and the file that says so; `names`: of the file in version 2, then in version 1."""
    found = []
    for directory in group_directories(tree, controller):
        for name in names:
            number = tree.number(f"{directory}/{name}")
            if number is not None and number < _V1_UNLIMITED:
                found.append((number, f"{directory}/{name}"))
    return min(found, default=None)

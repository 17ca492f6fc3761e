"""What the tools found, in lines for people: tables with sizes in units, and a sentence in the end. JSON has it all, exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DEPTH_ROWS = 8


def amount_text(size_bytes: int) -> str:
    """To three digits.

    >>> amount_text(512), amount_text(1536 << 20), amount_text(10_000_000_000), amount_text(1 << 40)
    ('512 B', '1.5 GiB', '9.31 GiB', '1 TiB')
    """
    size, unit = float(size_bytes), 0
    while abs(size) >= 999.5 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def cell_text(name: str, value: object) -> str:
    """By the unit in the name; nothing for what is not known."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    is_size = "bytes" in name.split("_") and isinstance(value, int) and not isinstance(value, bool)
    return amount_text(value) if is_size and isinstance(value, int) else str(value)


def table_lines(entries: Sequence[Entry], indent: str = "") -> list[str]:
    """A column for each name that stands in any entry, and holds something in one; numbers and sizes stand to the right."""
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    columns: list[list[str]] = []
    for name in names:
        cells = [cell_text(name, entry.get(name)) for entry in entries]
        if any(cells):
            columns.append(_column(name, cells, [entry.get(name) for entry in entries]))
    return [indent + "  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def _column(name: str, cells: Sequence[str], values: Sequence[object]) -> list[str]:
    width = max(len(name), *map(len, cells))
    is_number = all(isinstance(value, int | float | None) and not isinstance(value, bool) for value in values)
    shown = [name, *(cell or "-" for cell in cells)]
    return [cell.rjust(width) if is_number else cell.ljust(width) for cell in shown]


def field_lines(found: Entry, indent: str = "") -> Iterator[str]:
    """A line for each value; a table for each list of entries."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from field_lines(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"{indent}{name}:"
            yield from table_lines(value, indent + "  ")
        elif not (isinstance(value, str) and not value):
            yield f"{indent}{name}: {'none' if value is None else cell_text(name, value)}"


def gc_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """As `planning.plan` says it."""
    for node in found["nodes"]:
        yield (
            f"{node['node']}: {counted(node['segments'], 'segment')} of {counted(node['authors'], 'author')}, "
            f"{amount_text(node['bytes'])}, {counted(node['inodes'], 'inode')}; on their way out: "
            f"{counted(node['leaving_segments'], 'segment')}, {amount_text(node['leaving_bytes'])}"
        )
        whose = (
            "of what is tightest: the budget, or the filesystem's room"
            if node["budget_given"]
            else "of the filesystem's room is used, by whomever: no budget is given"
        )
        yield f"  budget_used: {100 * node['budget_used']:.1f} % {whose}"
        drops = [_drop(one) for one in node["drop"]]
        if not drops:
            yield "  nothing would go"
            continue
        yield f"  {counted(len(drops), 'segment')} would go, {amount_text(node['freed_bytes'])}:"
        yield from table_lines(drops, "  ")
    if not found["nodes"]:
        yield "no node has written here"


def _drop(one: Entry) -> Entry:
    idle_s = one.get("idle_s")
    return {
        "segment": f"{one['author']}/{one['number']}",
        "bytes": one["bytes"],
        "why": one["why"],
        "salvaged_blocks": one["salvaged_blocks"],
        "hottest": one.get("hottest"),
        "idle_s": None if idle_s is None else round(idle_s),
        "namespace": one.get("namespace"),
    }


def tree_lines(space: Mapping[str, Any]) -> Iterator[str]:
    """Of one namespace, as `tree.tree` says it."""
    apart = ("runs", "per_depth", "longest")
    yield from field_lines({name: value for name, value in space.items() if name not in apart})
    yield "blocks by depth:"
    yield from table_lines(depth_rows(space["per_depth"]), "  ")
    yield "longest chains:"
    yield from table_lines(space["longest"], "  ")
    yield "runs:"
    for run in space["runs"]:
        mark = "  (its parent is not stored)" if run["orphan"] else ""
        yield f"  {'  ' * run['level']}{run['first']} at {run['depth']}: {counted(run['blocks'], 'block')}{mark}"


def depth_rows(per_depth: Sequence[Sequence[int]]) -> list[Entry]:
    """Blocks by ranges of depth of about the same width, some rows at most.

    >>> [tuple(row.values()) for row in depth_rows([(depth, 2) for depth in range(20)])][:2]
    [('0-2', 6), ('3-5', 6)]
    """
    if not per_depth:
        return []
    width = -(-(per_depth[-1][0] + 1) // _DEPTH_ROWS)
    counts: dict[int, int] = {}
    for depth, blocks in per_depth:
        counts[depth // width] = counts.get(depth // width, 0) + blocks
    return [
        {"depths": str(at) if width == 1 else f"{at * width}-{(at + 1) * width - 1}", "blocks": blocks}
        for at, blocks in sorted(counts.items())
    ]


def fsck_sentence(found: Mapping[str, Any], *, repair: bool) -> str:
    """What a check came to, by the fields of its report."""
    total, noun = found["blocks"] + found["copies"], "record" if found["copies"] else "block"
    damaged, repaired = found["corrupt"], found["repaired"]
    parts = [f"{damaged} of {counted(total, noun)} {'is' if damaged == 1 else 'are'} damaged"] if damaged else []
    if damaged and not repair:
        parts.append("run with --repair to have them forgotten")
    elif damaged:
        parts.append(f"{counted(repaired, noun)} {'is' if repaired == 1 else 'are'} lost, and found by nobody any more")
    if found["unreadable"]:
        parts.append(f"the device refused to give {counted(found['unreadable'], noun)}: see to it, and try again")
    if found["wrong_manifests"]:
        parts.append(f"{counted(found['wrong_manifests'], 'namespace')} without a right manifest")
    if not parts:
        parts.append(f"fine: {counted(total, noun)}, 0 damaged")
    if found["published"]:
        parts.append(f"{counted(found['published'], noun)} that no log named can be found again")
    if found["unknown_files"]:
        parts.append(f"{counted(found['unknown_files'], 'unknown file')}, named above")
    return "; ".join(parts)


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "block"), counted(3, "block")
    ('1 block', '3 blocks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

"""Findings for people: three columns, and under each that is not fine what to do; a sentence at the end."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from kvmoverd.adapters.doctor.finding import Finding, Status

WIDTH = 120
_LEAST = 40


def finding_lines(rows: Sequence[tuple[str, Finding]], *, width: int = WIDTH) -> Iterator[str]:
    """`rows`: each with the name of its check."""
    names = max((len(name) for name, _ in rows), default=0)
    indent = " " * (len("skip") + 2 + names + 2)
    for name, finding in rows:
        yield from _wrapped(f"{finding.status.value:4}  {name:{names}}  ", finding.found, indent, width)
        if finding.remedy:
            yield from _wrapped(f"{indent}-> ", finding.remedy, f"{indent}   ", width)


def _wrapped(head: str, text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, len(indent) + _LEAST),
        initial_indent=head,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    ) or [head.rstrip()]


def summary(rows: Sequence[tuple[str, Finding]]) -> str:
    """
    >>> summary([("kernel", Finding(Status.OK, "6.1")), ("gid", Finding(Status.FAIL, "none", "do"))])
    '2 findings: 1 fail, 0 warn, 1 ok, 0 skip'
    """
    counts = {status: sum(finding.status is status for _, finding in rows) for status in Status}
    order = (Status.FAIL, Status.WARN, Status.OK, Status.SKIP)
    return f"{len(rows)} findings: {', '.join(f'{counts[status]} {status.value}' for status in order)}"

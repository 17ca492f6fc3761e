"""Transcripts: what the machines of one request answer to each event, compared exactly with `tests/scenarios/*.txt`.

A file declares its machines (`machine NAME KIND option=value ...`), then gives events (`NAME event`); the lines below
an event are what came of it: the actions in order, a refusal, the new state. `pytest --rewrite` writes them anew, to be
reviewed as a diff. Lines that begin with # and empty lines stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machines_kinds import assembly, fetch, push, store
from machines_kit import Bench
from machines_part_kind import part
from machines_words import parse, show
from stream_kind import stream

from kvmoverd.core.errors import BadRequest, NotWhole, UnknownRequest
from kvmoverd.core.machines.fetch import FetchKind

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))

MAKERS: dict[str, Callable[..., Bench]] = {
    "stream": stream,
    "part": part,
    "push": push,
    "assembly": assembly,
    "store": store,
    "fetch_lease": lambda **options: fetch(FetchKind.LEASE, **options),
    "fetch_pages": lambda **options: fetch(FetchKind.PAGES, **options),
}


def _make(kind: str, options: list[str]) -> Bench:
    pairs = (option.split("=") for option in options)
    return MAKERS[kind](**{name: int(value) for name, value in pairs})


def _outcome(bench: Bench, line: str) -> Iterator[str]:
    before = bench.machine.state
    try:
        told = bench.give(parse(line))
    except (BadRequest, NotWhole, UnknownRequest) as error:
        yield f"  refused with {type(error).__name__}: {error}"
        return
    yield from (f"  {show(action)}" for action in told)
    if bench.machine.state is not before:
        yield f"  -> {bench.machine.state.value}"
    elif not told:
        yield "  nothing"


def play(text: str) -> str:
    """The transcript with all outcomes as they are now. Every machine must come to its end."""
    benches: dict[str, Bench] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if not line or line.startswith("#"):
            continue
        name, *rest = line.split()
        if name == "machine":
            benches[rest[0]] = _make(rest[1], rest[2:])
        else:
            lines.extend(_outcome(benches[name], " ".join(rest)))
    for bench in benches.values():
        bench.check_over()
    return "\n".join(lines) + "\n"


def test_there_are_scenarios() -> None:
    assert SCENARIOS


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_machines_answer_as_written(path: Path, request: pytest.FixtureRequest) -> None:
    written = path.read_text()
    now = play(written)
    if request.config.getoption("--rewrite", default=False) or os.environ.get("KVMOVER_REWRITE") == "1":
        path.write_text(now)
        return
    assert now == written

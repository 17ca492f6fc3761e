"""Events and actions of the machines as lines of text.

An event is a tuple: the name of the machine's method without "on_", then its arguments. As a line:
`sent 0 OK`, `blocks 0=OK 1=MISS`, `layers 0=3`, `stop CANCELLED the engine asked`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, Protocol, TypeAlias

from kvmoverd.core.machines.actions import Action
from kvmoverd.core.machines.stream_part import StreamPart
from kvmoverd.core.machines.stream_parts import StreamParts
from kvmoverd.core.machines.window import Arrivals, LayerWindow
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import BlockOutcome, End, Reason

Event: TypeAlias = tuple[Any, ...]


class Machine(Protocol):
    @property
    def state(self) -> Enum: ...

    def on_stop(self, reason: Reason, message: str = "") -> list[Action]: ...

    def on_quiesce_timeout(self) -> list[Action]: ...


def parse(line: str) -> Event:
    """The event that a line says. Words that are no number, reason or pair begin the message.

    >>> parse("sent 0 IO_ERROR cable cut")
    ('sent', 0, <Reason.IO_ERROR: 11>, 'cable cut')
    """
    name, *words = line.split()
    if name == "reserved":
        return name, tuple(map(_share, words))
    args: list[Any] = []
    pairs: list[tuple[int, Reason | int]] = []
    while (
        words
        and re.fullmatch(r"\d+|-|\d+=[A-Z_]+|\d+=\d+|[A-Z_]{2,}", words[0])
        and not (args and isinstance(args[-1], Reason))
    ):
        word = words.pop(0)
        if "=" in word:
            block, said = word.split("=")
            pairs.append((int(block), int(said) if said.isdigit() else Reason[said]))
        else:
            args.append(int(word) if word.isdigit() else None if word == "-" else Reason[word])
    if name in ("prefix", "part_prefix") and isinstance(args[-1], Reason):
        args[-1] = BlockOutcome.of(args[-1])
    has_pairs = bool(pairs) or name in ("blocks", "layers", "found")
    return (name, *args, *([tuple(pairs)] if has_pairs else []), *([" ".join(words)] if words else []))


def _share(word: str) -> Share:
    """Who reads what: `de=0-2,5-7`."""
    node, _, runs = word.partition("=")
    return Share(node, Runs.of(*((int(a), int(b)) for a, b in (run.split("-") for run in runs.split(",")))))


def say(event: Event) -> str:
    """The line of an event: the inverse of `parse`."""
    return " ".join([event[0], *(_say(argument) for argument in event[1:])])


def _say(argument: Any) -> str:
    match argument:
        case None:
            return "-"
        case Reason():
            return argument.name
        case BlockOutcome():
            return argument.reason.name
        case Share(node, blocks):
            return f"{node}={','.join(f'{first}-{stop}' for first, stop in blocks.spans)}"
        case tuple() if all(isinstance(said, Share) for said in argument):
            return " ".join(map(_say, argument))
        case tuple():
            return " ".join(f"{block}={said.name if isinstance(said, Reason) else said}" for block, said in argument)
        case _:
            return str(argument)


def show(action: Action) -> str:
    """An action in one line, its fields by name.

    >>> from kvmoverd.core.machines.actions import Grant
    >>> show(Grant(prefix_blocks=3, layers=1))
    'Grant prefix_blocks=3 layers=1'
    """
    return " ".join([type(action).__name__, *_shown(action)])


def _shown(action: Action) -> Iterator[str]:
    for field in fields(action):
        value = getattr(action, field.name)
        if isinstance(value, End):
            yield _show_end(value)
        elif isinstance(value, Share):
            yield f"{field.name}={_say(value)}"
        elif isinstance(value, BlockOutcome):
            yield f"{field.name}={value.state.name}/{value.reason.name}"
        elif isinstance(value, tuple):
            yield f"{field.name}={','.join(v.reason.name if isinstance(v, BlockOutcome) else str(v) for v in value)}"
        else:
            yield f"{field.name}={'-' if value is None else value}"


def _show_end(end: End) -> str:
    quiet = "yes" if end.pages_quiet else "no"
    message = f': "{end.message}"' if end.message else ""
    return f"{end.reason.name} prefix_blocks={end.prefix_blocks} pages_quiet={quiet}{message}"


def give(machine: Machine, event: Event) -> list[Action]:
    """Tells a machine one event."""
    name, *arguments = event
    method = getattr(machine, name if name == "start" else f"on_{name}")
    told: list[Action] = method(*arguments)
    return told


def picture(value: Any) -> Any:
    """Everything a machine remembers, as plain data that can be compared."""
    if isinstance(value, LayerWindow | Arrivals | StreamParts) or hasattr(value, "on_stop"):
        return {name: picture(part) for name, part in vars(value).items()}
    if isinstance(value, StreamPart):
        return {part.name: picture(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, dict):
        return {name: picture(part) for name, part in value.items()}
    return value.copy() if isinstance(value, set) else value


def transcript(history: Sequence[Event]) -> str:
    """What was said to a machine, so that a failure can be played again by hand."""
    return "; ".join(say(event) for event in history)

"""What loads share: each is a process of its own, that moves bytes for a window of time and counts them."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from kvmoverd.adapters.transport.verbs import library

SETTLE_S = 0.5
"""Of load before a window begins, so that queues are as full in all of it."""
DRAIN_S = 40.0


@dataclass(frozen=True, slots=True)
class Window:
    """When to count, on the machine's monotonic clock. `period_s`: one write each so often; 0: as fast as it goes."""

    begin_s: float
    end_s: float
    period_s: float = 0.0

    @property
    def span_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass
class Moved:
    """What completed within a window; latencies from the post to the completion."""

    span_s: float
    moved_bytes: int = 0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def mb_per_s(self) -> float:
        return self.moved_bytes / self.span_s / 1e6

    def latency_ms(self, quantile: float) -> float:
        return float(np.quantile(self.latencies_s, quantile)) * 1e3 if self.latencies_s else float("nan")


class Load(Protocol):
    """Something that moves bytes, piece by piece. Of one thread."""

    depth: int
    piece_bytes: int

    def post(self, piece: int) -> None: ...

    def done(self) -> list[int]:
        """Pieces that have ended since. Raises when one failed."""

    def numbers(self) -> dict[str, list[int]]:
        """Queue pairs at both ends."""

    def close(self) -> None: ...


def run(load: Load, window: Window) -> Moved:
    """Keeps up to `depth` pieces under way from before the window to its end, then waits for the rest."""
    moved, posted = Moved(window.span_s), dict[int, float]()
    piece, due_s = 0, window.begin_s - SETTLE_S
    while posted or time.monotonic() < window.end_s:
        now_s = time.monotonic()
        if now_s > window.end_s + DRAIN_S:
            raise TimeoutError(f"{len(posted)} pieces did not end {DRAIN_S} s after the window")
        if len(posted) < load.depth and due_s <= now_s < window.end_s:
            posted[piece] = now_s
            load.post(piece)
            piece, due_s = piece + 1, due_s + window.period_s
            continue
        ended = load.done()
        now_s = time.monotonic()
        for one in ended:
            taken_s = now_s - posted.pop(one)
            if window.begin_s <= now_s < window.end_s:
                moved.moved_bytes += load.piece_bytes
                moved.latencies_s.append(taken_s)
        if not ended:
            time.sleep(0.0005)
    return moved


class Flow:
    """A load in a process of its own, that outlives its windows: connecting costs seconds in emulation."""

    def __init__(self, make: Any, *arguments: Any) -> None:
        self.pipe, far = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=_serve, args=(far, make, arguments))
        self.process.start()
        far.close()
        self.numbers: dict[str, list[int]] = {}
        """Queue pairs at both ends, by device: known when a window has ended."""
        self._answer(60.0)

    def begin(self, window: Window) -> None:
        self.pipe.send(window)

    def end(self) -> Moved:
        moved: Moved
        moved, self.numbers = self._answer(DRAIN_S + 60.0)
        return moved

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(10.0)
        self.process.kill()

    def _answer(self, timeout_s: float) -> Any:
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"a flow said nothing for {timeout_s} s")
        answer = self.pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"a flow failed:\n{answer}")
        return answer


def _serve(pipe: Connection, make: Any, arguments: tuple[Any, ...]) -> None:
    try:
        load = make(*arguments)
        pipe.send(None)
        while window := pipe.recv():
            pipe.send((run(load, window), load.numbers()))
        load.close()
    except EOFError:
        return
    except Exception:  # noqa: BLE001 - the parent raises it
        pipe.send(traceback.format_exc())


@contextmanager
def flows(**wanted: tuple[Any, ...]) -> Iterator[dict[str, Flow]]:
    """Named flows, each of a maker and its arguments; ended afterwards whatever happens."""
    library.load()
    made: dict[str, Flow] = {}
    try:
        for name, (make, *arguments) in wanted.items():
            made[name] = Flow(make, *arguments)
        yield made
    finally:
        for flow in made.values():
            flow.close()

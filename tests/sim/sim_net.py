"""The network between processes: messages in order, late by chance, held where it is cut; connections that break.

A connection joins two processes. While the way between two nodes is cut, or one of the two is frozen, nothing comes through;
when that lasts for the connection's patience, it breaks, on both sides. A process that dies is noticed at once, unless the way
is cut.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from sim_loop import Process, VirtualLoop

TICK_S = 0.05


class Connection:
    """Between `a` and `b`: FIFO each way. Whoever uses it says what happens when it breaks: once, each in its own process."""

    def __init__(self, net: Network, a: Process, b: Process, patience_s: float) -> None:
        self.net = net
        self.ends = (a, b)
        self.patience_s = patience_s
        self.broken = False
        self.on_broken: list[tuple[Process, Callable[[str], None]]] = []
        self._last_s = {id(a): 0.0, id(b): 0.0}
        self._held: list[tuple[Process, Callable[..., object], tuple[object, ...]]] = []
        self._stuck_since_s: float | None = None

    def send(self, to: Process, work: Callable[..., object], *args: object, delay_s: float = 0.0) -> None:
        """`work` happens in the other process, unless the connection breaks before."""
        if self.broken:
            return
        at_s = max(self._last_s[id(to)] + 1e-7, self.net.loop.time() + self.net.latency_s() + delay_s)
        self._last_s[id(to)] = at_s
        self.net.loop.call_at(at_s, self._arrive, to, work, args, context=self.net.context)

    def _arrive(self, to: Process, work: Callable[..., object], args: tuple[object, ...]) -> None:
        if self.broken:
            return
        if self._held or self.net.is_cut(*self.ends):
            self._held.append((to, work, args))
        else:
            to.soon(self._do, work, *args)

    def _do(self, work: Callable[..., object], *args: object) -> None:
        if not self.broken:
            work(*args)

    def look(self) -> None:
        """Time has passed."""
        now_s = self.net.loop.time()
        cut = self.net.is_cut(*self.ends)
        if any(end.is_dead for end in self.ends) and not cut:
            self.break_off("the process at the other end is gone")
        elif cut or not all(end.runs for end in self.ends):
            self._stuck_since_s = now_s if self._stuck_since_s is None else self._stuck_since_s
            if now_s - self._stuck_since_s > self.patience_s:
                self.break_off(f"nothing came back for {self.patience_s:g} s")
        else:
            self._stuck_since_s = None
            held, self._held = self._held, []
            for to, work, args in held:
                to.soon(self._do, work, *args)

    def break_off(self, why: str) -> None:
        """Both ends learn it, each when it runs."""
        if self.broken:
            return
        self.broken = True
        self._held.clear()
        self.net.connections.remove(self)
        for process, told in self.on_broken:
            process.soon(told, why)


class Network:
    """All processes, where they are, and which ways are cut."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.random = random.Random(f"net {seed}")
        self.context = Process(loop, "network").context
        self.latency_s_max = self.random.choice([0.0002, 0.002, 0.03])
        self.nodes: dict[Process, str] = {}
        self.connections: list[Connection] = []
        self._cuts: list[frozenset[str]] = []
        self._ticking = False

    def latency_s(self) -> float:
        return 0.00005 + self.random.random() * self.latency_s_max

    def connect(self, a: Process, b: Process, patience_s: float) -> Connection:
        made = Connection(self, a, b, patience_s)
        self.connections.append(made)
        self._tick_on()
        return made

    def is_cut(self, a: Process, b: Process) -> bool:
        way = {self.nodes[a], self.nodes[b]}
        return len(way) == 2 and any(way <= cut for cut in self._cuts)

    def cut(self, *nodes: str) -> None:
        """Between these nodes nothing comes through."""
        self._cuts.append(frozenset(nodes))

    def heal(self) -> None:
        self._cuts.clear()
        self.look()

    def look(self) -> None:
        for connection in list(self.connections):
            connection.look()

    def _tick_on(self) -> None:
        if not self._ticking:
            self._ticking = True
            self.loop.call_later(TICK_S, self._tick, context=self.context)

    def _tick(self) -> None:
        self._ticking = False
        self.look()
        if self.connections:
            self._tick_on()

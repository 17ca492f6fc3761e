"""How fast nodes read and send, and until when their storage NICs have work: as they report it, or as far as it can be known.

Between two reports a node goes on reading, so its queue is kept as the time when it will be empty. Without any report that time
comes of what was given to it alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvmoverd.core.levelling import Lane
from kvmoverd.core.scheduling.joint_pool import FAR_BYTES, Pool
from kvmoverd.core.scheduling.reports import NodeReport
from kvmoverd.core.scheduling.state import ALPHA_S, Model, Node

RISE_MAX = 4.0
"""A report's rate is believed up to so many times the one before: one that is too high makes a queue look short. One that is too
low is believed at once, since a node that has become slow must be left at once."""
TYPICAL_WEIGHT = 0.05
"""Of the newest report in what nodes are taken for that have not read yet."""
FORGET_FROM = 64
"""So many nodes that are gone may be remembered."""
_RATE_MIN = 1.0
"""Bytes per second: no node is taken to stand still for ever."""


class Pace:
    """One node. Rates in bytes per second; `free_ns`: when its storage NIC has read all that it has to."""

    __slots__ = ("_helped_bytes", "_rates", "_report", "free_ns", "lane", "measured", "node", "pool", "rate", "starved")

    def __init__(self, node: Node, rates: Rates, passed_bytes: int) -> None:
        self.node = node
        self.pool = Pool(node, passed_bytes)
        self._rates = rates
        self._report: NodeReport | None = None
        self.rate = 0.0
        self.measured = False
        self.lane = 0.0
        """Of its compute network; 0: not known."""
        self.free_ns = 0.0
        self.starved = False
        self._helped_bytes = 0

    def look(self) -> Pace:
        """As of the last report; that it is a new one is seen here."""
        report = self.node.report
        if report is not self._report or not self.measured:
            self._take(report)
        return self

    def lane_of(self, now_ns: int, *, crosses: bool) -> Lane:
        """What it reads, and sends to another node if that `crosses`: layers go as they come, so the slower of the two counts."""
        rate = min(self.rate, self.lane) if crosses and self.lane else self.rate
        ahead_ns = self.free_ns - now_ns
        return Lane(ahead_ns * rate / 1e9 if ahead_ns > 0 else 0.0, rate)

    def reads(self, now_ns: int) -> Lane:
        """What it reads for its own engines, as of the last report."""
        report = self.node.report
        if report is not self._report or not self.measured:
            self._take(report)
        rate, ahead_ns = self.rate, self.free_ns - now_ns
        return Lane(ahead_ns * rate / 1e9 if ahead_ns > 0 else 0.0, rate)

    def sends(self, now_ns: int) -> Lane:
        """What it reads for another node's, as of the last report."""
        report = self.node.report
        if report is not self._report or not self.measured:
            self._take(report)
        rate, ahead_ns = self.rate, self.free_ns - now_ns
        if 0.0 < self.lane < rate:
            rate = self.lane
        return Lane(ahead_ns * rate / 1e9 if ahead_ns > 0 else 0.0, rate)

    def give(self, read_bytes: float, now_ns: int) -> None:
        """It reads so much more."""
        free_ns = self.free_ns
        self.free_ns = (free_ns if free_ns > now_ns else now_ns) + read_bytes * 1e9 / self.rate
        self.pool.given_bytes += read_bytes

    def help(self, read_bytes: float) -> None:
        """Of what it reads so much takes room for other nodes."""
        self._helped_bytes += int(read_bytes)

    @property
    def help_room_bytes(self) -> int:
        return 0 if self._report is None else self._report.help_free_bytes - self._helped_bytes

    def _take(self, report: NodeReport | None) -> None:
        before, self._report = self._report, report
        new = report is not before
        if report is None:
            self.rate, self.measured = self._rates.typical, False
            self.lane, self.starved = 0.0, False
            return
        node, said = self.node, report.storage.rate_bytes_per_s
        ahead_bytes = max(0, node.queue_bytes)
        if before is not None and before.boot_id != report.boot_id:
            self.pool.empty()
        if new and self.rate:
            known_bytes = max(0.0, self.free_ns - node.heard_ns) * self.rate / 1e9
            self.pool.told(ahead_bytes - known_bytes, self.rate, node.heard_ns)
        if new and said > 0:
            self.rate = max(_RATE_MIN, min(said, RISE_MAX * self.rate) if self.measured else said)
            self.measured = True
            self._rates.saw(self.rate)
        elif not self.measured:
            self.rate = self._rates.typical
        if not new:
            return
        self.lane = float(report.lane_bytes_per_s)
        self.starved = report.starved
        self._helped_bytes = 0
        # A NIC from which nothing comes though reads are under way may be silent for as long again.
        self.free_ns = node.heard_ns + ahead_bytes * 1e9 / self.rate + report.storage.silent_ns


class Rates:
    """The nodes' paces, and what a node is taken for until it has read: the model's figure, then what was measured of others."""

    def __init__(self, model: Model, nodes: Mapping[str, Node] | None = None) -> None:
        """`nodes`: those there are, by name; None: whoever is asked for stays."""
        self._nodes = nodes
        self.typical = max(_RATE_MIN, model.alpha_bytes / ALPHA_S)
        self._seen = False
        self._paces: dict[str, Pace] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._paces)

    def of(self, node: Node) -> Pace:
        """As of its last report."""
        pace = self._paces.get(node.name)
        if pace is None or pace.node is not node:
            # What lay in the pool of a former node of this name is not there.
            self._made += 1
            pace = self._paces[node.name] = Pace(node, self, self._made * FAR_BYTES)
            if self._nodes is not None and len(self._paces) > 2 * len(self._nodes) + FORGET_FROM:
                self.keep(self._nodes)
        return pace.look()

    def saw(self, rate: float) -> None:
        """A node was measured."""
        self.typical += (TYPICAL_WEIGHT if self._seen else 1.0) * (rate - self.typical)
        self._seen = True

    def keep(self, nodes: Mapping[str, Node]) -> None:
        """Nodes that are gone are forgotten."""
        self._paces = {name: pace for name, pace in self._paces.items() if nodes.get(name) is pace.node}

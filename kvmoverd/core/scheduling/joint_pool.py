"""What a node's pool is believed to hold: as clients and sessions say, less what has gone through it since, and as far as it has
proved true.

Nobody reports what lies in a pool, and who says so may be wrong. What is read because it was not there shows in the node's read
queue, beyond what the node was given: so much of what was believed lately was not true. Until the next reports have come only
so much is believed as the node could read in a short time, so that one that is wrong about its pool does not draw all requests.
"""

from __future__ import annotations

from kvmoverd.core.scheduling.state import Node

BELIEVED_S = 1.0
"""Of its reads: more is not believed of a node until its next reports have shown what becomes of it."""
TRUST_MIN = 0.25
"""Below it nothing is believed."""
HALF_S = 10.0
"""What has proved wrong counts half after that time: nodes are tried again."""
NOISE = 0.1
"""Of what a node was given so much may show in its queue without being wrong: reads begin later than they are given."""
FAR_BYTES = 1 << 80
"""Beyond all sizes: what lay there before is gone."""


class Pool:
    """One node's. Bytes. `passed_bytes`: what has gone through since some beginning; what was there at another reading of it is
    as old as the difference."""

    __slots__ = (
        "_drift",
        "_late",
        "_new",
        "_vouched",
        "given_bytes",
        "node",
        "passed_bytes",
        "told_ns",
        "trust",
        "turned_ns",
    )

    def __init__(self, node: Node, passed_bytes: int) -> None:
        self.node = node
        self.passed_bytes = passed_bytes
        self.trust = 1.0
        self.told_ns = self.turned_ns = 0
        self.given_bytes = self._drift = self._vouched = 0.0
        """Over the last time: what it was given to read; what its queue had beyond that; what was believed not to be read."""
        self._new = self._late = 0.0
        """Of that, what its reports can't show yet."""

    def lasting(self, size_bytes: int, rate: float, since_bytes: int) -> int:
        """How much is believed of what somebody says lay there when `passed_bytes` was that. It is not known how old it was then:
        of a pool through which half its size has gone since, half is likely to be there."""
        report = self.node.report
        if report is None:
            return 0
        size_of_pool = report.buffer_bytes
        if size_of_pool:
            left = 1.0 - (self.passed_bytes - since_bytes) / size_of_pool
            size_bytes = int(min(size_bytes, size_of_pool) * left) if left > 0.0 else 0
        return self.believed(size_bytes, rate)

    def believed(self, size_bytes: int, rate: float) -> int:
        """Of what would be there by what is known of the pool."""
        if self.trust < TRUST_MIN or self._new + self._late > BELIEVED_S * rate:
            return 0
        return int(size_bytes * self.trust)

    def vouch(self, size_bytes: int) -> None:
        """So much is not read, since it is believed to be there."""
        self._new += size_bytes
        self._vouched += size_bytes

    def empty(self) -> None:
        """What lay there is gone."""
        self.passed_bytes += FAR_BYTES

    def told(self, more_bytes: float, rate: float, now_ns: int) -> None:
        """A report has come, and its queue is longer by so much than what the node was given; less than 0: shorter."""
        stays = 0.5 ** ((now_ns - self.told_ns) / 1e9 / HALF_S)
        self.told_ns = now_ns
        if now_ns - self.turned_ns >= self.node.lag_ns:
            self.turned_ns = now_ns
            self._late, self._new = self._new, 0.0
        self._vouched *= stays
        self.given_bytes *= stays
        slack = self.node.lag_ns * rate / 1e9
        drift = self._drift * stays + more_bytes
        # No more than all of it was wrong, so that what comes later counts as well.
        self._drift = max(-slack, min(drift, self._vouched + slack + NOISE * self.given_bytes))
        wrong = max(0.0, self._drift - slack - NOISE * self.given_bytes)
        self.trust = 1.0 - wrong / (self._vouched + slack) if wrong else 1.0

"""What a scheduled replay says: one dict a turn, and the sums that policies are compared by."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from kvmover_client.replay.report import Json
from kvmover_client.replay.router import Routed
from kvmover_client.replay.sampling import Samples, evenness
from kvmover_client.replay.trace import BLOCK_TOKENS

ERRORS_MAX = 100


@dataclass(frozen=True, slots=True)
class RoutedTurn:
    """One turn of one session, and its outcome."""

    session: str
    turn: int
    prompt_tokens: int
    routed: Routed

    @property
    def hit_tokens(self) -> int:
        return self.routed.finished.prefilled.hit_blocks * BLOCK_TOKENS if self.routed.finished else 0

    @property
    def loaded_bytes(self) -> int:
        return self.routed.finished.prefilled.loaded_bytes if self.routed.finished else 0

    @property
    def verified_bytes(self) -> int:
        finished = self.routed.finished
        return finished.prefilled.verified_bytes + finished.decoded.verified_bytes if finished else 0

    @property
    def dropped_blocks(self) -> int:
        return self.routed.finished.decoded.dropped_blocks if self.routed.finished else 0

    def as_json(self) -> Json:
        return {
            "session": self.session,
            "turn": self.turn,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "bytes": self.loaded_bytes,
            "ready_ms": round(self.routed.ready_s * 1e3, 3),
            "seconds": round(self.routed.seconds, 3),
            "verified_bytes": self.verified_bytes,
            "attempt": self.routed.finished.attempt if self.routed.finished else 0,
            "failures": list(self.routed.failures),
            "errors": list(self.routed.errors),
        }


@dataclass(slots=True)
class ScheduledReport:
    """All turns of a scheduled replay. Errors beyond the first hundred are only counted."""

    turns: list[RoutedTurn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    errors_left_out: int = 0

    def add(self, turn: RoutedTurn) -> None:
        self.turns.append(turn)
        for message in turn.routed.errors:
            self.error(f"{turn.session} turn {turn.turn}: {message}")

    def error(self, message: str) -> None:
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(message)
        else:
            self.errors_left_out += 1

    def summary(
        self, samples: Mapping[str, Samples], rate_bytes_per_s: int, by_rule: Counter[str], seconds: float
    ) -> Json:
        """`rate_bytes_per_s`: what each node's storage gives at most, 0 for no bound. `ttft_ms` counts until the last layer."""
        done = [turn for turn in self.turns if turn.routed.finished is not None]
        even = evenness(list(samples.values()), rate_bytes_per_s)
        left_out = [f"and {self.errors_left_out} more errors"] if self.errors_left_out else []
        return {
            "requests": len(self.turns),
            "done": len(done),
            "hit_tokens": sum(turn.hit_tokens for turn in done),
            "loaded_bytes": sum(turn.loaded_bytes for turn in done),
            "ttft_ms": times([turn.routed.ready_s * 1e3 for turn in done]),
            "storage_read_bytes": {node: each.total_bytes for node, each in samples.items()},
            "snic_max_over_avg": round(even.windows, 4),
            "snic_busy_windows": even.busy_windows,
            "snic_max_over_avg_whole": round(even.whole, 4),
            "by_rule": dict(sorted(by_rule.items())),
            "failed_tries": sum(len(turn.routed.failures) for turn in self.turns),
            "verified_bytes": sum(turn.verified_bytes for turn in self.turns),
            "dropped_blocks": sum(turn.dropped_blocks for turn in self.turns),
            "errors": self.errors + left_out,
            "seconds": round(seconds, 3),
        }


def times(found_ms: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile, the nearest rank; zeros for none.

    >>> times([3.0, 1.0, 2.0])
    {'mean': 2.0, 'p50': 2.0, 'p99': 3.0}
    """
    if not found_ms:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    ordered = sorted(found_ms)
    ranks = {name: ordered[math.ceil(part * len(ordered)) - 1] for name, part in (("p50", 0.5), ("p99", 0.99))}
    return {name: round(value, 3) for name, value in ({"mean": fmean(ordered)} | ranks).items()}

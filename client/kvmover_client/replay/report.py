"""What a replay says: one dict a turn, and the sums by path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvmover_client.replay.request import ReadPath
from kvmover_client.replay.turns import Played

Json: TypeAlias = dict[str, object]
ERRORS_MAX = 100


@dataclass(frozen=True, slots=True)
class TurnPlayed:
    """One turn of one session, and its outcome."""

    session: str
    turn: int
    path: ReadPath
    prompt_tokens: int
    block_tokens: int
    played: Played

    @property
    def hit_tokens(self) -> int:
        return self.played.prefilled.hit_blocks * self.block_tokens if self.played.prefilled else 0

    @property
    def loaded_bytes(self) -> int:
        return self.played.prefilled.loaded_bytes if self.played.prefilled else 0

    @property
    def first_layer_ms(self) -> float:
        return self.played.prefilled.first_layer_s * 1e3 if self.played.prefilled else 0.0

    @property
    def all_layers_ms(self) -> float:
        return self.played.prefilled.all_layers_s * 1e3 if self.played.prefilled else 0.0

    @property
    def verified_bytes(self) -> int:
        return sum(checked.verified_bytes for checked in (self.played.prefilled, self.played.decoded) if checked)

    @property
    def dropped_blocks(self) -> int:
        return self.played.decoded.dropped_blocks if self.played.decoded else 0

    def as_json(self) -> Json:
        """Times count from the plan; they are 0 when nothing was hit."""
        return {
            "session": self.session,
            "turn": self.turn,
            "path": self.path.value,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "bytes": self.loaded_bytes,
            "first_layer_ms": round(self.first_layer_ms, 3),
            "all_layers_ms": round(self.all_layers_ms, 3),
            "verified_bytes": self.verified_bytes,
            "dropped_blocks": self.dropped_blocks,
            "failed_attempts": list(self.played.failures),
            "seconds": round(self.played.seconds, 3),
            "errors": list(self.played.errors),
        }


@dataclass(slots=True)
class Report:
    """All turns of a replay. Errors beyond the first hundred are only counted."""

    turns: list[TurnPlayed] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    errors_left_out: int = 0

    def add(self, turn: TurnPlayed) -> None:
        self.turns.append(turn)
        for message in turn.played.errors:
            self.error(f"{turn.session} turn {turn.turn} ({turn.path.value}): {message}")

    def error(self, message: str) -> None:
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(message)
        else:
            self.errors_left_out += 1

    def summary(self, seconds: float) -> Json:
        left_out = [f"and {self.errors_left_out} more errors"] if self.errors_left_out else []
        return {
            "paths": {path.value: _path([turn for turn in self.turns if turn.path is path]) for path in ReadPath},
            "verified_bytes": sum(turn.verified_bytes for turn in self.turns),
            "dropped_blocks": sum(turn.dropped_blocks for turn in self.turns),
            "failed_attempts": sum(len(turn.played.failures) for turn in self.turns),
            "errors": self.errors + left_out,
            "seconds": round(seconds, 3),
        }


def _path(turns: Sequence[TurnPlayed]) -> Json:
    """Sums over all turns; rate and mean times over those that hit something."""
    hit = [turn for turn in turns if turn.loaded_bytes]
    loaded_bytes = sum(turn.loaded_bytes for turn in hit)
    all_layers_ms = sum(turn.all_layers_ms for turn in hit)
    return {
        "turns": len(turns),
        "hit_tokens": sum(turn.hit_tokens for turn in turns),
        "bytes": loaded_bytes,
        "gbytes_per_s": round(loaded_bytes / all_layers_ms / 1e6, 4) if all_layers_ms else 0.0,
        "first_layer_ms": round(sum(turn.first_layer_ms for turn in hit) / len(hit), 3) if hit else 0.0,
        "all_layers_ms": round(all_layers_ms / len(hit), 3) if hit else 0.0,
    }

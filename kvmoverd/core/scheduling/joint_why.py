"""Why the policy "joint" chose a pair: the prediction, the next best one, and both as they were. It is put into words when
somebody asks, since hardly anybody does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from kvmoverd.core.scheduling.explain import Board, EngineWhy, Given
from kvmoverd.core.scheduling.joint_predict import Prediction

BEST = ("ttft_ns", "read_ns", "wait_ns", "lane_ns", "own_ns")
NEXT = ("next_ttft_ns", "next_read_ns", "next_wait_ns")
NONE_GIVEN: list[Given] = []
"""A board is of one decision here: nobody adds to it."""

Number = tuple[str, float]


class Numbers(Sequence[Number]):
    """Seconds as they were predicted, in nanoseconds for who reads them, then `more` as they are."""

    __slots__ = ("_best", "_more", "_second")

    def __init__(self, best: Prediction, second: Prediction | None, more: tuple[Number, ...]) -> None:
        self._best = best[:6]
        self._second = () if second is None else second[:3]
        self._more = more

    def _words(self) -> tuple[Number, ...]:
        best = [(name, round(seconds * 1e9)) for name, seconds in zip(BEST, self._best, strict=False)]
        second = [(name, round(seconds * 1e9)) for name, seconds in zip(NEXT, self._second, strict=False)]
        return (*best, ("held_tokens", self._best[5]), *second, *self._more)

    @overload
    def __getitem__(self, place: int) -> Number: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Number]: ...
    def __getitem__(self, place: int | slice) -> Number | Sequence[Number]:
        return self._words()[place]

    def __len__(self) -> int:
        return len(self._words())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and self._words() == other._words()

    def __hash__(self) -> int:
        return hash(self._words())

    def __repr__(self) -> str:
        return repr(self._words())


def whys(
    best: Prediction, second: Prediction | None, rules: tuple[str, str], rate: float, short_of: str | None
) -> tuple[EngineWhy, EngineWhy]:
    """For both engines. `rules`: their words; `rate`: of the prefill engine; `short_of`: what the request has waited for."""
    engine_p, engine_d = best.prefill.engine, best.decode.engine
    seen_p, seen_d = [engine_p.seen()], [engine_d.seen()]
    if second is not None:
        if second.prefill.engine is not engine_p:
            seen_p.append(second.prefill.engine.seen())
        if second.decode.engine is not engine_d:
            seen_d.append(second.decode.engine.seen())
    more_p: tuple[Number, ...] = ("tok_e", engine_p.tok_e), ("tokens_per_s", rate)
    more_d: tuple[Number, ...] = ("free_hbm_tokens", engine_d.free_hbm), ("tok_e", engine_d.tok_e)
    if short_of is not None:
        more_d = (*more_d, (f"waited_for_{short_of}", 1))
    return (
        EngineWhy(rules[0], engine_p.name, Numbers(best, second, more_p), Board(seen_p, NONE_GIVEN)),
        EngineWhy(rules[1], engine_d.name, Numbers(best, second, more_d), Board(seen_d, NONE_GIVEN)),
    )

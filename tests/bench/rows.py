"""What a row of the table is, as numbers, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.bench.pairs import PAIRS_MIN, Interval, Pair, Verdict, interval, verdict

Json = dict[str, object]


@dataclass(frozen=True)
class Row:
    """A figure with its interval, its aim and every run behind it.

    `found` is what is compared with `aim`: a ratio where there is a reference of the same round, else `ours` itself.
    """

    name: str
    unit: str
    ours: float
    found: Interval
    aim: float | None
    verdict: Verdict
    runs: list[Json]
    reference: float | None = None
    lower_is_better: bool = False
    notes: Json = field(default_factory=dict)

    def json(self) -> Json:
        return {
            "unit": self.unit,
            "reference": self.reference,
            "ours": self.ours,
            "value": self.found.median,
            "ratio": self.found.median if self.reference is not None else None,
            "low": self.found.low,
            "high": self.found.high,
            "aim": self.aim,
            "better": "lower" if self.lower_is_better else "higher",
            "verdict": self.verdict.value,
            "runs": self.runs,
            **self.notes,
        }


@dataclass(frozen=True)
class NotRun:
    """A row without figures, and why."""

    name: str
    why: str

    def json(self) -> Json:
        return {"verdict": Verdict.NOT_RUN.value, "why": self.why}


@dataclass(frozen=True)
class Cost:
    """Core-seconds per GB of our processes: all of it, the checksums' part, and what is left, which has the aim."""

    name: str
    with_crc: Interval
    crc: float
    aim: float
    verdict: Verdict
    reference: float

    def json(self) -> Json:
        return {
            "with_crc": self.with_crc.median,
            "crc": self.crc,
            "beside_crc": self.with_crc.median - self.crc,
            "low": self.with_crc.low - self.crc,
            "high": self.with_crc.high - self.crc,
            "reference": self.reference,
            "aim": self.aim,
            "verdict": self.verdict.value,
        }


def ratio_row(name: str, pairs: Sequence[Pair], *, aim: float | None, seed: int, notes: Json | None = None) -> Row:
    """GB/s of both sides; the median of the pairs' ratios is compared with the aim."""
    found = interval([pair.ratio for pair in pairs], seed)
    return Row(
        name,
        "GB/s",
        _median([pair.ours.amount for pair in pairs]),
        found,
        aim,
        verdict(found, aim, runs=len(pairs)),
        [_pair_json(pair) for pair in pairs],
        reference=_median([pair.reference.amount for pair in pairs]),
        notes=notes or {},
    )


def plain_row(
    name: str,
    unit: str,
    values: Sequence[float],
    *,
    aim: float | None,
    seed: int,
    lower_is_better: bool = True,
    runs_min: int = PAIRS_MIN,
    notes: Json | None = None,
) -> Row:
    """A figure of ours alone. `runs_min`: as many values as a verdict needs, where each stands for many."""
    found = interval(values, seed)
    return Row(
        name,
        unit,
        found.median,
        found,
        aim,
        verdict(found, aim, runs=len(values), lower_is_better=lower_is_better, runs_min=runs_min),
        [{"ours": value} for value in values],
        lower_is_better=lower_is_better,
        notes=notes or {},
    )


def fraction_row(
    name: str, parts: Sequence[tuple[float, float]], *, aim: float, seed: int, notes: Json | None = None
) -> Row:
    """Milliseconds to a part and to the whole, of which the part should be small; `parts` in seconds."""
    found = interval([part_s / all_s for part_s, all_s in parts], seed)
    return Row(
        name,
        "ms",
        1e3 * _median([part_s for part_s, _ in parts]),
        found,
        aim,
        verdict(found, aim, runs=len(parts), lower_is_better=True),
        [{"reference": all_s * 1e3, "ours": part_s * 1e3, "ratio": part_s / all_s} for part_s, all_s in parts],
        reference=1e3 * _median([all_s for _, all_s in parts]),
        lower_is_better=True,
        notes=notes or {},
    )


def cost_of(name: str, pairs: Sequence[Pair], *, crc: float, aim: float, seed: int) -> Cost:
    """`crc`: core-seconds per GB that the checksums take."""
    found = interval([pair.ours.cpu_s_per_gb for pair in pairs], seed)
    beside = Interval(found.median - crc, found.low - crc, found.high - crc)
    judged = verdict(beside, aim, runs=len(pairs), lower_is_better=True)
    return Cost(name, found, crc, aim, judged, _median([pair.reference.cpu_s_per_gb for pair in pairs]))


HEAD = f"{'row':<28}{'reference':>10}{'ours':>10}{'found':>10}  {'95 %':<22}{'aim':>7}  verdict"


def row_text(row: Row | NotRun) -> str:
    """One line of the table, under `HEAD`."""
    if isinstance(row, NotRun):
        return f"{row.name:<28}not run: {row.why}"
    reference = f"{row.reference:.3g}" if row.reference is not None else "-"
    aim = f"{row.aim:g}" if row.aim is not None else "-"
    span = f"{_short(row.found.low)} to {_short(row.found.high)}"
    return (
        f"{row.name:<28}{reference:>10}{row.ours:>10.3g}{_short(row.found.median):>10}  {span:<22}{aim:>7}  "
        f"{row.verdict.value} ({row.unit}, {len(row.runs)} runs{_neighbours_text(row)})"
    )


def runs_text(row: Row) -> str:
    """All runs, a line each."""
    parts = [" ".join(f"{name} {_short(value)}" for name, value in run.items()) for run in row.runs]
    return "\n".join(f"    {row.name} {number:>2}: {part}" for number, part in enumerate(parts, 1))


def cost_text(cost: Cost) -> str:
    return (
        f"{cost.name:<28}{cost.with_crc.median:>9.3f} with crc, crc {cost.crc:.3f}, beside it "
        f"{cost.with_crc.median - cost.crc:.3f} ({cost.with_crc.low - cost.crc:.3f} to "
        f"{cost.with_crc.high - cost.crc:.3f}), aim {cost.aim:g}: {cost.verdict.value}; "
        f"the reference's own {cost.reference:.3f}"
    )


def _neighbours_text(row: Row) -> str:
    cores = row.notes.get("others_cores")
    return f"; others had {cores:.1f} cores" if isinstance(cores, float) else ""


def _pair_json(pair: Pair) -> Json:
    return {
        "reference": pair.reference.amount,
        "ours": pair.ours.amount,
        "ratio": pair.ratio,
        "ours_first": pair.ours_first,
        "reference_cpu_s_per_gb": pair.reference.cpu_s_per_gb,
        "ours_cpu_s_per_gb": pair.ours.cpu_s_per_gb,
    }


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _short(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if abs(value) < 10_000 else f"{value:.0f}"

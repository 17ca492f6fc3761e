"""How much prefill fits into one forward pass: the quota on attention time within an engine. Pure arithmetic, no daemon needed.

Ranks that run in step wait for the slowest, and what makes one slow is attention over long contexts. So each engine takes of its
queue, in order, what its attention layers are predicted to do within a quota, and cuts the request that does not fit whole.

    curve = fit([Sample(flops, seconds), ...])                       # of one attention layer, measured on this GPU
    quota = AttentionQuota(Attention(flops_per_pair=2 * 128 * 960), curve, layers=61)
    batch = quota.admit([Work(cached=32_000, bsz=429), ...])

Decode engines need none: they batch all they have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvmover_client.errors import BadRequest

QUOTA_S = 0.3
TOKENS_MAX = 1 << 40
"""Of a request, cached and new: far above any context, and its square stays exact enough in a float."""
SAMPLES_MIN = 4
SAMPLES_MAX = 100_000
SPREAD_MIN = 2.0
"""The largest sample has at least so many times the FLOPs of the smallest: from one size no slope can be known."""
MISS_MAX = 0.25
"""Half of the samples lie within this fraction of the curve, or they are no curve."""
_ROUNDS = 30
_HUBER = 1.345
"""Residuals beyond so many standard deviations count by their distance only, not by its square: 95 % as good on clean samples."""
_MAD_TO_SIGMA = 1.4826

QuotaScope = Literal["forward", "layer"]
Floats = npt.NDArray[np.float64]


class BadSamples(BadRequest):
    """Samples from which no curve can be fitted; the message has the numbers."""

    reason_default = "BAD_SAMPLES"


@dataclass(frozen=True, slots=True)
class Work:
    """A request, or what is left of it: `cached` tokens whose KV is there, `bsz` tokens that this engine computes.

    Raises `BadRequest` for negative numbers, and for more than `TOKENS_MAX` tokens in all.
    """

    cached: int
    bsz: int

    def __post_init__(self) -> None:
        if self.cached < 0 or self.bsz < 1 or self.cached + self.bsz > TOKENS_MAX:
            raise BadRequest(
                f"(cached, bsz) is ({self.cached}, {self.bsz}): cached from 0, bsz from 1, together at most {TOKENS_MAX}"
            )


@dataclass(frozen=True, slots=True)
class Attention:
    """FLOPs of one attention layer. `flops_per_pair`: of a query token with one key, over all heads: 2 heads (d_qk + d_v).

    `keys_max`: sparse attention looks at so many keys at most; `index_flops_per_pair`: what choosing them costs for each key.
    Raises `BadRequest` for numbers that are not above 0.
    """

    flops_per_pair: float
    keys_max: int | None = None
    index_flops_per_pair: float = 0.0

    def __post_init__(self) -> None:
        whole = self.keys_max is None or self.keys_max > 0
        if not (0 < self.flops_per_pair < math.inf and 0 <= self.index_flops_per_pair < math.inf and whole):
            raise BadRequest(
                f"flops_per_pair {self.flops_per_pair}, index_flops_per_pair {self.index_flops_per_pair}, keys_max "
                f"{self.keys_max}: the first and the last must be above 0, the second not below, all finite"
            )

    def flops(self, cached: int, bsz: int) -> float:
        """Of `bsz` new tokens after `cached` ones: the i-th of them looks at cached + i keys.

        >>> Attention(flops_per_pair=1).flops(10, 3)  # 11 + 12 + 13
        36.0
        >>> Attention(flops_per_pair=1, keys_max=12).flops(10, 3)
        35.0
        """
        pairs = bsz * cached + bsz * (bsz + 1) / 2
        return self.flops_per_pair * self._looked_at(cached, bsz, pairs) + self.index_flops_per_pair * pairs

    def _looked_at(self, cached: int, bsz: int, pairs: float) -> float:
        if self.keys_max is None or cached + bsz <= self.keys_max:
            return pairs
        below = min(bsz, max(0, self.keys_max - cached))
        return below * cached + below * (below + 1) / 2 + (bsz - below) * self.keys_max


@dataclass(frozen=True, slots=True)
class Sample:
    """One attention layer, timed: the FLOPs of its whole batch, and how long it took, in seconds."""

    flops: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Curve:
    """seconds = base_s + root_s sqrt(F) + slope_s F: launches, kernels that are not filled yet, and the rate of full ones.

    No part is negative, so that the curve never falls. `miss`: the median distance of the samples from it, as a fraction.
    """

    base_s: float
    root_s: float
    slope_s: float
    miss: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.base_s, self.root_s, self.slope_s)
        if not all(0 <= part < math.inf for part in parts) or not any(parts[1:]):
            raise BadRequest(
                f"the curve's parts are {parts} s: each at least 0 and finite, one of the last two above 0"
            )

    def seconds(self, flops: float) -> float:
        """Of a layer; nothing to compute takes no time."""
        return self.base_s + self.root_s * math.sqrt(flops) + self.slope_s * flops if flops > 0 else 0.0


def fit(samples: Sequence[Sample]) -> Curve:
    """The curve that is nearest to the samples, by least squares of the *relative* distance, parts not negative.

    Relative, since samples span decades and a quota wants the small ones right, too. Outliers (a GPU that did something else
    meanwhile) are weighted down by Huber's rule, with the spread from the median distance, until the weights stand still.
    Raises `BadSamples`: fewer than `SAMPLES_MIN` or more than `SAMPLES_MAX`, a number that is not above 0 and finite, FLOPs that
    span less than `SPREAD_MIN`, times that don't grow with FLOPs, half of the samples further than `MISS_MAX` from the curve.

    >>> curve = fit([Sample(flops, 2e-5 + flops / 4e14) for flops in (1e9, 1e10, 1e11, 1e12)])
    >>> round(curve.base_s * 1e6), round(1 / curve.slope_s / 1e12), round(curve.miss, 6)
    (20, 400, 0.0)
    """
    flops, seconds = _checked(samples)
    scale = float(flops.max())
    part = flops / scale
    columns = np.stack([np.ones_like(part), np.sqrt(part), part], axis=1) / seconds[:, None]
    weights = np.ones_like(part)
    found = np.zeros(3)
    for _ in range(_ROUNDS):
        found = _nonnegative(columns * weights[:, None], weights)
        off = np.abs(columns @ found - 1.0)
        sigma = max(_MAD_TO_SIGMA * float(np.median(off)), 1e-9)
        fresh = np.sqrt(np.minimum(1.0, _HUBER * sigma / np.maximum(off, 1e-12)))
        if np.allclose(fresh, weights, atol=1e-4):
            break
        weights = fresh
    miss = float(np.median(np.abs(columns @ found - 1.0)))
    base_s, root_s, slope_s = (float(number) for number in found)
    if root_s + slope_s <= base_s * 1e-6:
        raise BadSamples(
            f"times do not grow with FLOPs: {flops.min():.3g} to {scale:.3g} FLOPs take {base_s:.3g} s each"
        )
    if miss > MISS_MAX:
        raise BadSamples(
            f"half of the {len(samples)} samples are off the curve by more than {miss:.0%}, {MISS_MAX:.0%} may be"
        )
    return Curve(base_s, root_s / math.sqrt(scale), slope_s / scale, miss)


def _checked(samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    if not SAMPLES_MIN <= len(samples) <= SAMPLES_MAX:
        raise BadSamples(f"{len(samples)} samples: {SAMPLES_MIN} to {SAMPLES_MAX} make a curve")
    for index, sample in enumerate(samples):
        if not (0 < sample.flops < math.inf and 0 < sample.seconds < math.inf):
            raise BadSamples(
                f"sample {index}: {sample.flops} FLOPs in {sample.seconds} s; both must be above 0 and finite"
            )
    flops = np.array([sample.flops for sample in samples], dtype=np.float64)
    spread = float(flops.max() / flops.min())
    if spread < SPREAD_MIN:
        raise BadSamples(
            f"all samples lie between {flops.min():.3g} and {flops.max():.3g} FLOPs, a spread of {spread:.2f}: "
            f"at least {SPREAD_MIN} is needed"
        )
    return flops, np.array([sample.seconds for sample in samples], dtype=np.float64)


def _nonnegative(columns: Floats, wanted: Floats) -> Floats:
    """Least squares with no part below 0: of the seven choices of parts that may be used, the best allowed one."""
    best, best_loss = np.zeros(columns.shape[1]), math.inf
    for chosen in ([0, 1, 2], [0, 2], [1, 2], [0, 1], [2], [1], [0]):
        parts, *_ = np.linalg.lstsq(columns[:, chosen], wanted, rcond=None)
        if (parts < 0).any():
            continue
        loss = float(np.sum((columns[:, chosen] @ parts - wanted) ** 2))
        if loss < best_loss:
            best, best_loss = np.zeros(columns.shape[1]), loss
            best[chosen] = parts
    return best


@dataclass(frozen=True, slots=True)
class Batch:
    """What goes into the forward pass: of the first `len(taken)` waiting requests so many tokens each.

    Only the last one may be cut; `rest` is what is left of it and stays at the head of the queue. `attention_s`: of one layer or
    of the whole pass, as the quota's scope is. `over_quota`: it is more than the quota, since less can't be computed.
    """

    taken: tuple[Work, ...]
    rest: Work | None
    attention_s: float
    over_quota: bool = False


@dataclass(frozen=True, slots=True)
class AttentionQuota:
    """Admits prefill work, first come first served, while the attention is predicted to take at most `quota_s` seconds.

    `scope`: the quota holds for all `layers` of a forward pass, or for each layer alone. `curve`: of one layer, from `fit`.
    Raises `BadRequest` for a quota or layers that are not above 0, and for another scope.
    """

    attention: Attention
    curve: Curve
    layers: int
    quota_s: float = QUOTA_S
    scope: QuotaScope = "forward"

    def __post_init__(self) -> None:
        if not 0 < self.quota_s < math.inf or self.layers < 1:
            raise BadRequest(f"quota_s is {self.quota_s}, layers {self.layers}: both must be above 0 and finite")
        if self.scope not in ("forward", "layer"):
            raise BadRequest(f"scope is {self.scope!r}, must be 'forward' or 'layer'")

    def seconds(self, flops: float) -> float:
        """Predicted for a batch whose attention has so many FLOPs a layer, in the quota's scope."""
        return self.curve.seconds(flops) * (self.layers if self.scope == "forward" else 1)

    def admit(self, waiting: Sequence[Work]) -> Batch:
        """Takes from the head while all of it fits. Of the first one that does not, the largest bsz' that does, found by
        bisection: it is taken, the rest is chunked off, and nothing behind it overtakes.

        If not even one token of the very first fits, one token is taken nevertheless: an engine must get on.
        """
        taken: list[Work] = []
        flops = 0.0
        for work in waiting:
            more = flops + self.attention.flops(work.cached, work.bsz)
            if self.seconds(more) <= self.quota_s:
                taken.append(work)
                flops = more
                continue
            bsz = self._largest(work, flops)
            if not bsz and taken:
                break
            return self._cut(taken, work, max(1, bsz), flops)
        return Batch(tuple(taken), None, self.seconds(flops))

    def _largest(self, work: Work, flops: float) -> int:
        """The most tokens of it that fit beside `flops`; 0 when none do. It is known that not all of them do."""
        fits, fails = 0, work.bsz
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.seconds(flops + self.attention.flops(work.cached, middle)) <= self.quota_s:
                fits = middle
            else:
                fails = middle
        return fits

    def _cut(self, taken: list[Work], work: Work, bsz: int, flops: float) -> Batch:
        predicted_s = self.seconds(flops + self.attention.flops(work.cached, bsz))
        rest = Work(work.cached + bsz, work.bsz - bsz) if bsz < work.bsz else None
        return Batch((*taken, Work(work.cached, bsz)), rest, predicted_s, predicted_s > self.quota_s)

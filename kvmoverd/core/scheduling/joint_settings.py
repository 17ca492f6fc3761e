"""What the policy "joint" goes by, checked."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from kvmoverd.core.errors import BadRequest
from kvmoverd.core.scheduling.reports import NAME_CHARS_MAX, TOKENS_MAX

WEIGHT_MIN, WEIGHT_MAX = 1e-3, 1e3
WEIGHTS_MAX = 65_536

BOUNDS: dict[str, tuple[float, float]] = {
    "floor_ns": (0, 10_000_000_000),
    "helpers_max": (0, 8),
    "candidates": (1, 64),
    "beta_ns": (1_000_000, 3_600_000_000_000),
    "decode_level": (1.0, 100.0),
    "age_ns": (1_000_000, 86_400_000_000_000),
    "aged_every": (2, 1_000),
    "look_max": (1, 1_000),
    "bypass_max": (1, 1_000_000),
    "tenants_max": (1, 1_000_000),
    "sessions_max": (0, 10_000_000),
    "session_ns": (0, 86_400_000_000_000),
    "pages_tokens": (0, TOKENS_MAX),
}


@dataclass(frozen=True, slots=True)
class JointSettings:
    """All within the bounds beside them, else `BadRequest`. Times in nanoseconds."""

    floor_ns: int = 2_000_000
    """Who reads with others lets the request begin sooner by more than that; 0 to 10 s."""
    helpers_max: int = 2
    """Third nodes that read one request with its two; 0 to 8."""
    candidates: int = 2
    """Engines a side that are compared because they are free first, and as many because their node reads first; 1 to 64."""
    beta_ns: int = 2_000_000_000
    """A prefill engine that has more to do gets nothing; 1 ms to 1 h. Less than the paper's 5 s: what is bound needs buffer."""
    decode_level: float = 1.25
    """A decode engine that is more than half full and above so much of the mean load is avoided; 1 to 100."""
    age_ns: int = 30_000_000_000
    """Who has waited longer has turns beside those of the tenants; 1 ms to a day."""
    aged_every: int = 4
    """Each so many-th turn is the oldest request's of those; 2 to 1,000."""
    look_max: int = 16
    """Requests that are passed over at once because no decode node has room for them; 1 to 1,000."""
    bypass_max: int = 64
    """So many others may go before one for which there was no room; then a decode engine is kept for it; 1 to 1,000,000."""
    tenants_max: int = 4_096
    """Tenants whose turns are remembered though nothing of theirs waits; 1 to 1,000,000."""
    sessions_max: int = 100_000
    """Sessions of which it is remembered where their last request ran; 0 to 10,000,000."""
    session_ns: int = 600_000_000_000
    """And for how long; 0 to a day."""
    pages_tokens: int = 0
    """KV of requests that are over that a prefill engine keeps in its pages, in tokens: a session's next request finds it there;
    0 to 2^40. 0: most keep none, and of those that do a request's `cached` says so."""
    weights: tuple[tuple[str, float], ...] = ()
    """Tenants' shares relative to each other, 0.001 to 1,000; 1 for those that are not here. At most 65,536, each once."""

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            number = getattr(self, name)
            if not (isfinite(number) and least <= number <= most):
                raise BadRequest(f"{name} is {number}, must be {least:g} to {most:g}")
        if len(self.weights) > WEIGHTS_MAX or len(dict(self.weights)) != len(self.weights):
            raise BadRequest(
                f"weights are {len(self.weights)}, at most {WEIGHTS_MAX} may be, and each tenant is in them once"
            )
        for tenant, weight in self.weights:
            if len(tenant) > NAME_CHARS_MAX or not (isfinite(weight) and WEIGHT_MIN <= weight <= WEIGHT_MAX):
                raise BadRequest(
                    f"weight of tenant {tenant[:NAME_CHARS_MAX]!r} is {weight}, must be {WEIGHT_MIN:g} to {WEIGHT_MAX:g}; "
                    f"names have at most {NAME_CHARS_MAX} characters"
                )

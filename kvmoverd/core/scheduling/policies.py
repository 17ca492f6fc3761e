"""The policies by name."""

from __future__ import annotations

from functools import partial

from kvmoverd.core.errors import BadRequest
from kvmoverd.core.scheduling.baselines import PrefillOnly, RoundRobin
from kvmoverd.core.scheduling.joint import JointPolicy
from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.paper import PaperPolicy
from kvmoverd.core.scheduling.policy import PolicyMaker

POLICIES: dict[str, PolicyMaker] = {
    PaperPolicy.name: PaperPolicy,
    RoundRobin.name: RoundRobin,
    PrefillOnly.name: PrefillOnly,
    JointPolicy.name: JointPolicy,
}


def maker(name: str, joint: JointSettings | None = None) -> PolicyMaker:
    """`joint`: for the policy of that name. Raises `BadRequest` for a name that is none."""
    if name not in POLICIES:
        raise BadRequest(f"policy is {name!r}, must be one of {', '.join(sorted(POLICIES))}")
    return partial(JointPolicy, settings=joint) if name == JointPolicy.name else POLICIES[name]

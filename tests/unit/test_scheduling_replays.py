"""Logs of schedulers that start anew among dying engines play the same again: adoptions, fences, draining, giving back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvmoverd.core.scheduling import journal
from kvmoverd.core.scheduling.policies import POLICIES
from kvmoverd.core.scheduling.reports import NodeReport
from kvmoverd.core.scheduling.requests import Fence, Ticket
from tests.unit import scheduling_world_kit
from tests.unit.test_scheduling_restarts import STEPS, _walked


class _Logged:
    """A cluster of which every call is written down, with the words of one that is not."""

    def __init__(self, models: Any, lines: list[str], **made: Any) -> None:
        self._recorded = journal.Recorded(models, lines.append, **made)

    def node_reported(self, report: NodeReport, now_ns: int) -> tuple[Fence, ...]:
        """As from the wire, where one that comes twice is not the same object."""
        return self._recorded.node_reported(replace(report), now_ns)

    def cancel(self, request_id: str) -> Ticket:
        return self._recorded.cancel(request_id, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorded if hasattr(journal.Recorded, name) else self._recorded.cluster, name)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", [3, 4])
def test_the_log_of_each_scheduler_plays_the_same_decisions_again(
    seed: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[list[str]] = []

    def made(models: Any, **more: Any) -> _Logged:
        logs.append([])
        return _Logged(models, logs[-1], **more)

    monkeypatch.setattr(scheduling_world_kit, "Cluster", made)
    _walked(seed, policy, STEPS)
    assert len(logs) > 1
    for lines in logs:
        assert journal.replay(lines).same
    pulls = [line["words"] for lines in logs for line in map(json.loads, lines) if line.get("in") == "pull"]
    assert any(words[-1] for words in pulls), "nobody said that it holds anything"
    assert sum(len(journal.replay(lines).was) for lines in logs) > STEPS // 10

"""Explanations fit into their message, however many candidates there were."""

from __future__ import annotations

import json

import pytest

from kvmoverd.core.scheduling.explain import Board, EngineWhy, Explain, PathWhy, Seen
from kvmoverd.rpc.scheduler_explain import BYTES_MAX, CANDIDATES_MAX, explain_message


def explained(candidates: int, name: str) -> Explain:
    board = Board([Seen(f"{name}{number}", name, 1, 2, 3, 4) for number in range(candidates)])
    prefill = EngineWhy("C2", f"{name}0", (("alpha_bytes", 1.0), ("beta_tokens", 2.0)), board)
    return Explain("paper", prefill, EngineWhy("low", "d", ()), PathWhy("tie", (("n", 5),), 6), 7)


@pytest.mark.parametrize(
    ("candidates", "name", "shown"),
    [
        (3, "engine", 3),
        (CANDIDATES_MAX, "engine", CANDIDATES_MAX),
        (CANDIDATES_MAX + 1, "engine", 0),
        (CANDIDATES_MAX, "\U0001f5a5" * 240, 0),
    ],
)
def test_all_candidates_are_shown_or_none(candidates: int, name: str, shown: int) -> None:
    reply = explain_message(explained(candidates, name))
    assert len(reply.text.encode()) <= BYTES_MAX
    assert len(reply.json.encode()) <= BYTES_MAX
    words = json.loads(reply.json)
    assert len(words["prefill"].get("candidates", [])) == shown
    assert words["prefill"]["engine"] == f"{name}0"
    assert ("left out" in reply.text) is (shown == 0)

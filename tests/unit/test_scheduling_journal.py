"""The decision log: played again it decides the same, under another policy it says what would differ."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.journal import BadJournal, Choice, Recorded, diff, replay
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.policies import POLICIES
from kvmoverd.core.scheduling.reports import Done, EngineReport, GroupReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import Assignment, Request
from kvmoverd.core.shares import Depth
from tests.unit.scheduling_kit import KV, MODEL, MS


def history(seed: int, policy: str, steps: int = 250) -> list[str]:
    """A random history of two groups of each role, with losses, refusals and a request that waits too long."""
    chance, lines, now_ns, told = random.Random(seed), list[str](), 1_000 * MS, dict[str, list[Assignment]]()
    cluster = Recorded([MODEL], lines.append, policy=policy, limits=Limits(waiting_max=30, wait_max_ns=1_500 * MS))
    for step in range(steps):
        now_ns += chance.randrange(1, 200) * MS
        group = chance.choice(["p1", "p2", "d1", "d2"])
        try:
            match chance.randrange(10):
                case 0:
                    depth = Depth(chance.randrange(400) * KV, 10**6)
                    cluster.node_reported(NodeReport(chance.choice(["np1", "nd1", "nd2"]), "b", step, depth), now_ns)
                case 1 | 2 | 3:
                    cluster.submit(Request(f"r{step}", "m", chance.randrange(1, 200), tenant="t"), now_ns)
                case 4:
                    cluster.tick(now_ns)
                case 5:
                    if chance.random() < 0.2:
                        cluster.lose_group(group, now_ns)
                    cluster.cancel(f"r{chance.randrange(step + 1)}", now_ns)
                case _:
                    done = tuple(Done(a.request_id, a.attempt) for a in told.pop(group, []) if chance.random() < 0.5)
                    engines = tuple(
                        EngineReport(f"{group}/{n}", f"n{group}", 0, chance.randrange(600), 500) for n in range(2)
                    )
                    role = Role.PREFILL if group[0] == "p" else Role.DECODE
                    found = cluster.pull(GroupReport(group, "m", role, "b", step, engines, 0, done), now_ns)
                    told[group] = [delivery.what for delivery in found if isinstance(delivery.what, Assignment)]
        except KvmoverError:
            continue
    return lines


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(3))
def test_a_log_that_is_played_again_gives_the_same_decisions(seed: int, policy: str) -> None:
    lines = history(seed, policy)
    played = replay(lines)
    assert played.same and len(played.was) > 20
    assert diff(lines, policy) == []


def test_a_log_has_failures_too_and_says_why_of_each_assignment() -> None:
    out = [json.loads(line) for line in history(1, "paper") if '"out"' in line]
    assert {line["out"] for line in out} == {"assigned", "failed"}
    assigned = next(line for line in out if line["out"] == "assigned")
    assert assigned["why"]["prefill"]["rule"] in ("C2", "C3") and "z_tokens" in assigned["why"]["decode"]
    assert all("no engine for" in line["why"] for line in out if line["out"] == "failed")


def one_request(**changes: Any) -> list[str]:
    """Of 100 tokens, 64 of them hit; the prefill node's read queue is the shorter one."""
    lines: list[str] = []
    cluster = Recorded([MODEL], lines.append, **changes)
    cluster.node_reported(NodeReport("a", "b", 1, Depth(0)), 1)
    cluster.node_reported(NodeReport("x", "b", 1, Depth(5)), 2)
    cluster.submit(Request("r", "m", 100, 64), 3)
    cluster.pull(GroupReport("d", "m", Role.DECODE, "b", 1, (EngineReport("x/0", "x", 0, 0, 999),)), 4)
    engines = (EngineReport("a/0", "a", 1, 90), EngineReport("a/1", "a"))
    cluster.pull(GroupReport("p", "m", Role.PREFILL, "b", 1, engines), 5)
    cluster.choose_path("m", "a", "x", 7, 6)
    cluster.lose_node("a", 7)
    return lines


def test_another_policy_says_which_request_would_have_gone_elsewhere() -> None:
    lines = one_request()
    was = Choice("r", 1, "a/1", "x/0", "PE")
    assert replay(lines).was == replay(lines).now == (was,)
    (only,) = diff(lines, "round-robin")
    assert (only.was, only.now, only.words) == (was, was._replace(prefill="a/0"), ("prefill",))


def test_one_that_another_policy_would_let_wait_is_told_as_such() -> None:
    lines = [line for line in one_request(policy="round-robin") if '"pull"' not in line or '"p"' not in line]
    (only,) = diff(lines, "paper")
    assert only.now is None and only.words == ("waits",)


def test_a_request_that_failed_is_a_decision_without_engines() -> None:
    lines: list[str] = []
    cluster = Recorded([MODEL], lines.append, limits=Limits(wait_max_ns=5), numbers_from=1_000)
    cluster.submit(Request("r", "m", 1), 0)
    cluster.tick(6)
    assert replay(lines).now == (Choice("r", 1, "", "", ""),) and replay(lines).same
    assert json.loads(lines[0])["numbers_from"] == 1_000


def test_a_log_has_the_settings_of_the_joint_policy() -> None:
    settings = JointSettings(helpers_max=1, weights=(("gold", 2.5),))
    lines = one_request(joint=settings)
    assert replay(lines).same and json.loads(lines[0])["joint"]["weights"] == [["gold", 2.5]]
    broken = json.loads(lines[0])
    broken["joint"]["helpers_max"] = -1
    with pytest.raises(BadJournal, match="line 1 is not the first"):
        replay([json.dumps(broken), *lines[1:]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [], "line 1 is no JSON"),
        (lambda lines: ["[]"], "line 1 is no object"),
        (lambda lines: ['{"version":9}'], "line 1: version is 9, 3 can be played"),
        (lambda lines: ['{"version":3}'], "line 1 is not the first"),
        (lambda lines: [*lines, "{"], r"line \d+ is no JSON"),
        (lambda lines: [*lines, '{"at_ns":1,"in":"dance","words":[]}'], "no call is named 'dance'"),
        (lambda lines: [*lines, '{"at_ns":1,"in":"pull","words":[1]}'], "is not one of a decision log"),
        (lambda lines: [*lines, '{"in":"tick"}'], "is not one of a decision log"),
    ],
)
def test_a_log_that_is_damaged_is_refused_with_the_line(change: Any, said: str) -> None:
    with pytest.raises(BadJournal, match=said):
        replay(change(one_request()))

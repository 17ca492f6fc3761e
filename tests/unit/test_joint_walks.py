"""Random histories under the policy "joint": what every assignment keeps to, whoever reports or is lost."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from kvmoverd.core.errors import QueueFull
from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.journal import Recorded, replay
from kvmoverd.core.scheduling.reports import Done
from kvmoverd.core.scheduling.requests import Assignment, State
from kvmoverd.core.status import Path
from tests.unit.joint_kit import BUFFER, GPU, KV, MODEL, MS, ROOM, SNIC, Yard
from tests.unit.scheduling_kit import assert_sound

STEPS = 250


class Walk:
    """Engines that take and finish work, nodes that report what they like, and what each assignment has to keep to."""

    def __init__(self, seed: int, *, reports: bool) -> None:
        self.chance = random.Random(seed)
        self.reports = reports
        self.yard = Yard(3, 4, ranks=2, bypass_max=8, age_ns=3_000 * MS, helpers_max=self.chance.randrange(3))
        self.buffers = {node: self.chance.choice([20_000, 60_000]) * KV for node in self.yard.nodes}
        self.yard.room = {
            name: self.chance.choice([30_000, 90_000]) for ranks in self.yard.ranks.values() for name in ranks
        }
        self.pending: dict[str, Assignment] = {}
        self.decoding: dict[str, Assignment] = {}
        self.count = 0
        self.assigned: list[Assignment] = []

    def begin(self) -> None:
        for node in self.yard.nodes:
            self.report(node)
        self.yard.pull()

    def step(self) -> None:
        yard, chance = self.yard, self.chance
        yard.now_ns += chance.randrange(5, 120) * MS
        what = chance.random()
        node = chance.choice(yard.nodes)
        if what < 0.35:
            self.submit()
        elif what < 0.75:
            yard.pull(node, done=tuple(self.ended(node)))
        elif what < 0.93:
            self.report(node)
        elif what < 0.95:
            self.lose(node)
        elif what < 0.97 and self.count:
            yard.cluster.cancel(f"r{chance.randrange(self.count)}")
        else:
            yard.cluster.tick(yard.now_ns)
        self.see()
        assert_sound(yard.cluster)

    def submit(self) -> None:
        chance = self.chance
        tokens = int(100 * 200 ** chance.random())
        where = " ".join(chance.sample([*self.yard.nodes, "p0/0", "p1/1", "gone"], chance.randrange(3)))
        more = {"tenant": chance.choice("abc"), "session": chance.choice(["", "s", "t"]), "cached": where}
        head = chance.randrange(tokens)
        try:
            self.yard.submit(f"r{self.count}", tokens, chance.randrange(tokens), head=head, **more)
        except QueueFull:
            return
        self.count += 1

    def ended(self, node: str) -> list[Done]:
        """What its engines have finished by now."""
        done = []
        for name in self.yard.ranks[node]:
            for request_id in list(self.yard.has[name]):
                if self.chance.random() < 0.5:
                    del self.yard.has[name][request_id]
                    ticket = self.yard.cluster.ticket(request_id)
                    if ticket.state is State.ASSIGNED:
                        done.append(Done(request_id, ticket.attempt))
                        if name.startswith("p"):
                            self.pending.pop(request_id, None)
        return done

    def report(self, node: str) -> None:
        if not self.reports:
            return
        chance = self.chance
        used = sum(what.prompt_tokens * KV for what in self.pending.values() if what.decode_node == node)
        self.yard.node(
            node,
            chance.randrange(50_000),
            chance.choice([0, SNIC // 10, SNIC, 2 * SNIC]),
            buffer_bytes=self.buffers[node],
            buffer_free_bytes=max(0, self.buffers[node] - used),
            lane_bytes_per_s=chance.choice([0, SNIC]),
            starved=chance.random() < 0.1,
            help_free_bytes=chance.choice([0, BUFFER]),
        )

    def lose(self, node: str) -> None:
        self.yard.cluster.lose_group(node, self.yard.now_ns)
        self.yard.heard.pop(node, None)
        for name in self.yard.ranks[node]:
            self.yard.has[name].clear()

    def see(self) -> None:
        """All that was assigned in this step is looked at."""
        self.yard.news()
        new = self.yard.assigned[len(self.assigned) :]
        self.assigned += new
        for what in new:
            self.pending[what.request_id] = what
            assert_kept(what)
        for request_id, what in list(self.pending.items()):
            ticket = self.yard.cluster.ticket(request_id)
            if ticket.state is not State.ASSIGNED or ticket.attempt != what.attempt:
                del self.pending[request_id]
        if not self.reports:
            return
        for node in {what.decode_node for what in new}:
            known = self.yard.cluster.nodes[node].report is not None
            held = sum(what.prompt_tokens * KV for what in self.pending.values() if what.decode_node == node)
            assert not known or held <= self.buffers[node], f"{node} holds {held} B of {self.buffers[node]}"


def assert_kept(what: Assignment) -> None:
    """The numbers agree with each other, engines have room, parts cover the whole."""
    numbers = dict(what.explain.prefill.numbers)
    parts_ns = max(numbers["read_ns"], numbers["wait_ns"]) + numbers["lane_ns"] + numbers["own_ns"]
    assert numbers["ttft_ns"] == pytest.approx(parts_ns, abs=4)
    assert numbers["ttft_ns"] <= numbers.get("next_ttft_ns", numbers["ttft_ns"])
    assert numbers["wait_ns"] <= 2_000 * MS and numbers["tok_e"] <= 2 * GPU
    assert dict(what.explain.decode.numbers)["free_hbm_tokens"] >= what.prompt_tokens
    assert what.explain.path.hit_bytes <= what.hit_tokens * KV
    parts = what.read.parts
    assert (len(parts) >= 2) == (what.read.path is Path.PARTS)
    if parts:
        assert len({part.node for part in parts}) == len(parts)
        assert parts[0].first == 0.0 and parts[-1].stop == 1.0
        assert all(before.stop == after.first for before, after in pairwise(parts))
        assert all(part.first < part.stop for part in parts)


@pytest.mark.parametrize("seed", range(6))
def test_every_assignment_has_room_and_covers_all_and_was_the_soonest_that_was_compared(seed: int) -> None:
    walk = Walk(seed, reports=True)
    walk.begin()
    for _ in range(STEPS):
        walk.step()
    assert len(walk.assigned) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_every_assignment_keeps_to_it_in_long_histories(seed: int) -> None:
    walk = Walk(seed, reports=bool(seed % 4))
    walk.begin()
    for _ in range(1_500):
        walk.step()
    assert len(walk.assigned) > 100


def test_it_works_without_any_report_of_a_node() -> None:
    walk = Walk(2, reports=False)
    walk.begin()
    for _ in range(STEPS):
        walk.step()
    assert len(walk.assigned) > 20
    assert len({what.decode_node for what in walk.assigned}) == 4


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_history_gives_the_same_choices(seed: int) -> None:
    walks = [Walk(seed, reports=True) for _ in range(2)]
    for walk in walks:
        walk.begin()
        for _ in range(STEPS):
            walk.step()
    assert walks[0].assigned == walks[1].assigned


def test_a_decision_log_plays_the_same_choices_again() -> None:
    lines: list[str] = []
    yard = Yard(3, 4)
    joint = JointSettings(helpers_max=1, weights=(("a", 3.0),))
    yard.cluster = Recorded([MODEL], lines.append, policy="joint", joint=joint)  # type: ignore[assignment]
    yard.begin()
    chance = random.Random(2)
    for number in range(120):
        yard.now_ns += 30 * MS
        tokens = chance.randrange(100, 3_000)
        yard.submit(f"r{number}", tokens, tenant=chance.choice("ab"), session=chance.choice("st"))
        yard.node(chance.choice(yard.nodes), chance.randrange(1_000), help_free_bytes=BUFFER)
        yard.pull()
        if number % 3 == 2:
            yard.finish(yard.assigned[number // 3])
    played = replay(lines)
    assert played.same and len(played.was) >= 60
    assert {choice.path for choice in played.was} >= {"PARTS", "DE"}


def test_all_are_served_and_nobody_waits_for_ever_among_small_ones() -> None:
    yard = Yard(2, 2, bypass_max=8, age_ns=2_000 * MS)
    yard.room = {"d0/0": 9_000, "d1/0": 9_000}
    yard.begin()
    chance = random.Random(5)
    waits: dict[str, int] = {}
    arrived: dict[str, int] = {}
    running: list[tuple[int, Assignment]] = []
    for number in range(1_500):
        yard.now_ns += 20 * MS
        tokens = 8_500 if number % 60 == 0 else chance.randrange(100, 600)
        arrived[f"r{number}"] = yard.now_ns
        yard.submit(f"r{number}", tokens, hit=0, tenant=chance.choice("ab"))
        yard.pull()
        seen = len(waits)
        for what in yard.assigned[seen:]:
            waits[what.request_id] = yard.now_ns - arrived[what.request_id]
            running.append((yard.now_ns + 400 * MS, what))
        due = [what for ends_ns, what in running if ends_ns <= yard.now_ns]
        running = [(ends_ns, what) for ends_ns, what in running if ends_ns > yard.now_ns]
        for what in due:
            for node, engine in ((what.prefill_node, what.prefill_engine), (what.decode_node, what.decode_engine)):
                yard.has[engine].pop(what.request_id, None)
                yard.pull(node, done=(Done(what.request_id, what.attempt),))
    large = [waits.get(f"r{number}", 10**12) for number in range(0, 1_400, 60)]
    assert max(large) < 5_000 * MS
    assert len(waits) > 1_450 and ROOM > 9_000

"""Random histories of a world around a scheduler that starts anew: no request is lost, none goes on twice unseen, attempts rise.

What the policies say of their choices is held against their own numbers on the way.
"""

from __future__ import annotations

import json

import pytest

from kvmoverd.core.scheduling.policies import POLICIES
from kvmoverd.core.scheduling.requests import Assignment, State, Ticket
from tests.unit.scheduling_kit import MS, assert_sound
from tests.unit.scheduling_why_kit import assert_explained
from tests.unit.scheduling_world_kit import Leader, World

STEPS = 250
SEEDS = 10


class _Walk:
    def __init__(self, seed: int, policy: str) -> None:
        self.world = World(seed, policy)
        self.told: dict[str, int] = {}
        self.said: dict[str, State] = {}

    def step(self) -> None:
        world = self.world
        chance = world.chance
        world.now_ns += chance.randrange(1, 400) * MS
        self.happen(chance.random())
        self.listen()
        world.check_works()
        world.check_nodes()
        assert_sound(world.cluster)

    def happen(self, what: float) -> None:
        world = self.world
        client = world.chance.choice(list(world.clients.values())) if world.clients else world.new_request()
        leader = world.chance.choice(list(world.leaders.values()))
        if what < 0.17:
            world.submit(world.new_request())
        elif what < 0.27:
            world.look(client)
        elif what < 0.29:
            world.leave(client)
        elif what < 0.64:
            world.work(leader, 0.4)
            world.pull(leader, lost=0.2)
        elif what < 0.81:
            daemon = world.chance.choice(list(world.daemons.values()))
            world.daemon_reports(daemon, lost=0.2, queue_tokens=world.chance.randrange(600))
        elif what < 0.86 and world.said:
            world.say_again()
        elif what < 0.91:
            world.cluster.tick(world.now_ns)
        else:
            self.end(what, leader)

    def end(self, what: float, leader: Leader) -> None:
        """Somebody dies, or is said to."""
        world = self.world
        daemon = world.chance.choice(list(world.daemons.values()))
        if what < 0.93:
            leader.restart()
        elif what < 0.95:
            world.cluster.lose_group(leader.name, world.now_ns)
        elif what < 0.965:
            world.cluster.lose_node(daemon.name, world.now_ns)
        elif what < 0.975:
            world.kill_daemon(daemon)
        elif what < 0.985:
            daemon.draining = not daemon.draining
        else:
            self.restart()

    def restart(self) -> None:
        self.said.clear()
        self.world.start_scheduler()

    def listen(self) -> None:
        """News have every change, in order; attempts rise, whichever scheduler gives them out."""
        world = self.world
        for news in world.cluster.take_news():
            if isinstance(news, Ticket):
                self.said[news.request_id] = news.state
                continue
            assert news.attempt > self.told.get(news.request_id, 0), news
            self.told[news.request_id] = news.attempt
            self.said[news.request_id] = State.ASSIGNED
            world.given[news.request_id, news.attempt] = news
            assert_explained(news.explain, news)
        for entry in world.cluster.entries():
            if not (entry.state is State.WAITING and entry.request.request_id not in self.said):
                assert self.said[entry.request.request_id] is entry.state, entry.ticket()

    def calm(self) -> None:
        """Nobody dies any more: all that anybody waits for is served."""
        world = self.world
        for daemon in world.daemons.values():
            daemon.draining = False
        for _ in range(400):
            world.now_ns += 300 * MS
            for daemon in world.daemons.values():
                world.daemon_reports(daemon)
            for leader in world.leaders.values():
                world.work(leader, 0.5)
                world.pull(leader)
            for client in world.clients.values():
                if not client.state.ended:
                    world.look(client)
            world.cluster.tick(world.now_ns)
            self.listen()
            world.check_works()
            world.check_nodes()
            if not world.cluster.live and all(client.state.ended for client in world.clients.values()):
                return
        raise AssertionError([entry.ticket() for entry in world.cluster.entries()])


def _walked(seed: int, policy: str, steps: int) -> _Walk:
    walk = _Walk(seed, policy)
    for number in range(steps):
        if number == steps // 2:
            walk.restart()
        walk.step()
    walk.calm()
    ends = {name: client.state for name, client in walk.world.clients.items()}
    assert set(ends.values()) <= {State.DONE, State.CANCELLED}
    served = {name for name, attempts in walk.world.finished.items() if attempts}
    assert {name for name, end in ends.items() if end is State.DONE} <= served
    assert not any(leader.has for leader in walk.world.leaders.values())
    return walk


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_request_is_lost_or_goes_on_twice_while_schedulers_groups_and_nodes_die(seed: int, policy: str) -> None:
    walk = _walked(seed, policy, STEPS)
    assert walk.world.boot > 1 and len(walk.world.given) > STEPS // 10


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(100, 120))
def test_no_request_is_lost_or_goes_on_twice_in_many_long_histories(seed: int, policy: str) -> None:
    _walked(seed, policy, 1_000)


def test_what_an_assignment_says_of_itself_is_json_and_text() -> None:
    walk = _walked(1, "paper", STEPS)
    what = next(given for given in walk.world.given.values() if given.explain.prefill.board.seen)
    assert isinstance(what, Assignment)
    words = json.loads(json.dumps(what.explain.json(candidates=True)))
    assert words["prefill"]["engine"] == what.prefill_engine and words["decode"]["engine"] == what.decode_engine
    assert what.prefill_engine in what.explain.text()

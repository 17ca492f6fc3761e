"""What nodes' pools are believed to hold: by their size, by what has gone through them, and by what became of it before."""

from __future__ import annotations

from kvmoverd.core.scheduling.joint_pace import Pace, Rates
from kvmoverd.core.scheduling.reports import NodeReport
from kvmoverd.core.scheduling.state import Node
from kvmoverd.core.shares import Depth
from tests.unit.joint_kit import MODEL, MS, SNIC, Yard, only

POOL = 100_000_000
HINT = 50_000_000


class Teller:
    """A node, and what it reports."""

    def __init__(self, pool_bytes: int = POOL) -> None:
        self.node = Node("n", 200 * MS)
        self.rates = Rates(MODEL)
        self.pool_bytes = pool_bytes
        self.now_ns = 0
        self.sequence = 0

    def report(self, queue_bytes: int = 0, after_ms: int = 300, boot_id: str = "b") -> Pace:
        self.now_ns += after_ms * MS
        self.sequence += 1
        said = NodeReport("n", boot_id, self.sequence, Depth(queue_bytes, SNIC), buffer_bytes=self.pool_bytes)
        self.node.reported(said, self.now_ns)
        return self.rates.of(self.node)

    def lasting(self, since_bytes: int | None = None) -> int:
        pace = self.rates.of(self.node)
        since_bytes = pace.pool.passed_bytes if since_bytes is None else since_bytes
        return pace.pool.lasting(HINT, pace.rate, since_bytes)


def test_it_is_believed_the_less_the_more_has_gone_through_the_pool() -> None:
    teller = Teller()
    pace = teller.report()
    said_at = pace.pool.passed_bytes
    assert teller.lasting(said_at) == HINT
    pace.pool.passed_bytes += POOL // 4
    assert teller.lasting(said_at) == HINT * 3 // 4
    pace.pool.passed_bytes += POOL
    assert teller.lasting(said_at) == 0


def test_a_pool_holds_no_more_than_its_size_and_one_of_unknown_size_what_is_said() -> None:
    small, unknown = Teller(pool_bytes=HINT // 2), Teller(pool_bytes=0)
    assert Teller().lasting() == 0, "a node that never reported"
    small.report()
    unknown.report()
    assert (small.lasting(), unknown.lasting()) == (HINT // 2, HINT)


def test_reads_that_nobody_gave_take_the_belief_away_and_time_gives_it_back() -> None:
    teller = Teller()
    pace = teller.report()
    for _ in range(8):
        pace.pool.vouch(teller.lasting())
        teller.report(HINT)
        teller.report(after_ms=1_000)
    assert teller.lasting() == 0 and pace.pool.trust < 0.25
    for _ in range(40):
        teller.report(after_ms=1_000)
    assert teller.lasting() == HINT


def test_belief_that_proves_true_is_kept() -> None:
    teller = Teller()
    pace = teller.report()
    for _ in range(20):
        assert teller.lasting() == HINT
        pace.pool.vouch(HINT)
        teller.report()
        pace.give(SNIC // 10, teller.now_ns)
        teller.node.give(SNIC // 10, teller.now_ns)
        teller.report(after_ms=200)


def test_what_a_node_is_believed_to_have_is_bounded_until_its_next_reports() -> None:
    teller = Teller()
    pace = teller.report()
    for _ in range(2):
        assert teller.lasting() == HINT
        pace.pool.vouch(HINT)
    pace.pool.vouch(1)
    assert teller.lasting() == 0
    for _ in range(2):
        teller.report()
    assert teller.lasting() == HINT


def test_a_node_of_the_same_name_and_a_pool_that_was_emptied_have_nothing_of_before() -> None:
    teller = Teller()
    before = teller.report().pool.passed_bytes
    teller.rates.of(teller.node).pool.empty()
    assert teller.lasting(before) == 0
    teller.node = Node("n", 200 * MS)
    teller.report()
    assert teller.lasting(before) == 0 and teller.lasting() == HINT
    now = teller.rates.of(teller.node).pool.passed_bytes
    teller.report(boot_id="another")
    assert teller.lasting(now) == 0


def test_reads_for_others_and_what_decodes_there_go_through_a_nodes_pool() -> None:
    yard = Yard(1, 1, helpers_max=0).begin()
    rates = yard.cluster._books["m"].policy._rates  # type: ignore[attr-defined]
    pools = {name: rates.of(yard.cluster.nodes[name]).pool for name in ("p0", "d0")}
    before = {name: pool.passed_bytes for name, pool in pools.items()}
    what = only(yard.submit("r", 10_000, hit=8_000))
    passed = {name: pool.passed_bytes - before[name] for name, pool in pools.items()}
    assert passed == {"p0": dict(what.explain.path.reads)["p0"], "d0": 10_000_000}
    yard.cluster.choose_path("m", "p0", "d0", 4_000, yard.now_ns)
    assert pools["d0"].passed_bytes - before["d0"] == 14_000_000

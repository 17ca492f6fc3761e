"""The scheduler's books while this process leads, who waits for news of them, and what they look like from outside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kvmover_proto import scheduler_pb2
from kvmoverd.core.errors import KvmoverError, NotLeading, ShuttingDown, UnknownRequest
from kvmoverd.core.scheduling.cluster import Cluster
from kvmoverd.core.scheduling.counts import Counts
from kvmoverd.core.scheduling.explain import Explain, PathWhy
from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.journal import Recorded
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.numbers import NOBODY, Census, Durations, JournalNumbers, SchedulerNumbers
from kvmoverd.core.scheduling.reports import GroupReport, NodeReport
from kvmoverd.core.scheduling.requests import Delivery, Fence, ReadChoice, Request, Ticket
from kvmoverd.core.scheduling.state import Model
from kvmoverd.ports.decision_log import DecisionLog
from kvmoverd.rpc.scheduler_waits import Waits

log = logging.getLogger(__name__)

GOLDEN = 0.6180339887
"""Multiples of it, taken modulo 1, are spread as evenly as can be, however many there are."""


@dataclass(frozen=True, slots=True)
class OfficeSettings:
    """Nodes report every `report_interval_s` and leaders pull every `pull_interval_s`, but all leaders together no more often
    than `pulls_per_s` and all nodes than `reports_per_s`: that is what one core can answer."""

    models: tuple[Model, ...]
    policy: str
    limits: Limits
    joint: JointSettings
    waits_max: int
    report_interval_s: float
    pull_interval_s: float
    pulls_per_s: int
    reports_per_s: int


@dataclass(frozen=True, slots=True)
class Chance:
    """Time and identity: monotonic nanoseconds, nanoseconds of the day, a new boot id."""

    now_ns: Callable[[], int]
    wall_ns: Callable[[], int]
    new_boot_id: Callable[[], str]


class Office:
    """Every call of the scheduler that changes something, and the words of it to those that wait. Nothing here blocks.

    A scheduler that comes to lead knows nothing of what another one, or itself, knew before: it gets a new boot id, and asks
    leaders what they hold. `on_fault` is told of a fault of our own: the books can't be trusted after it.
    """

    def __init__(
        self, settings: OfficeSettings, chance: Chance, on_fault: Callable[[], None], journal: DecisionLog | None = None
    ) -> None:
        self.settings = settings
        self.waits = Waits(settings.waits_max)
        self.calls = {"submit": Durations(), "pull": Durations()}
        self.leader = ""
        self.leads_total = 0
        self.identity = scheduler_pb2.SchedulerIdentity(boot_id=chance.new_boot_id())
        self._chance = chance
        self._on_fault = on_fault
        self._journal = journal
        self._books: Cluster | Recorded | None = None
        self._turn = 0
        self._asked: dict[str, str] = {}
        """Leaders' boots, by group, that were asked what they hold and have not said it."""
        self._census = NOBODY
        self._closed = False
        self.may_lead: Callable[[], bool] = _always
        """Asked before each call: one that stood still may not have been told yet that another one leads."""

    # Who leads.

    @property
    def leads(self) -> bool:
        return self._books is not None and self.may_lead()

    def lead(self, epoch: int) -> None:
        """This scheduler decides from here on."""
        settings, now_ns = self.settings, self._chance.now_ns()
        self.identity = scheduler_pb2.SchedulerIdentity(boot_id=self._chance.new_boot_id(), epoch=epoch)
        self.leads_total += 1
        self.leader = ""
        self._asked.clear()
        made: dict[str, Any] = {
            "policy": settings.policy,
            "limits": settings.limits,
            "joint": settings.joint,
            "numbers_from": self._chance.wall_ns(),
            "settled_ns": now_ns + settings.limits.settle_ns,
        }
        if self._journal is None:
            self._books = Cluster(settings.models, **made)
        else:
            self._journal.begin()
            self._books = Recorded(settings.models, self._journal.write, **made)

    def step_down(self, leader: str) -> None:
        """Another one decides, at this address; empty: not known who."""
        self.leader = leader
        self._books = None
        self._asked.clear()
        self._census = NOBODY
        self.waits.end(lambda: NotLeading(leader=leader))

    def close(self) -> None:
        """Every call fails from here on."""
        self._closed = True
        self.waits.end(_shutting_down)

    # Calls.

    def submit(self, request: Request) -> Ticket:
        with self._changing() as (books, now_ns):
            return books.submit(request, now_ns)

    def ticket(self, request_id: str) -> Ticket:
        with self._naming_itself():
            return self._cluster().ticket(request_id)

    async def changed_ticket(self, request_id: str, is_known: Callable[[Ticket], bool], wait_ms: int) -> Ticket:
        """As soon as it is another one than is known, or after the time."""
        until_ns = self._chance.now_ns() + wait_ms * 1_000_000
        while True:
            ticket = self.ticket(request_id)
            left_ns = until_ns - self._chance.now_ns()
            if left_ns <= 0 or not is_known(ticket):
                return ticket
            await self.waits.change(request_id, left_ns / 1e9)

    def withdraw(self, request_id: str) -> Ticket:
        with self._naming_itself(), self._changing() as (books, now_ns):
            return books.cancel(request_id, now_ns) if isinstance(books, Recorded) else books.cancel(request_id)

    def explain(self, request_id: str) -> Explain:
        return self._cluster().explain(request_id)

    def choose_path(self, model: str, prefill: str, decode: str, hit_tokens: int) -> tuple[ReadChoice, PathWhy]:
        with self._changing() as (books, now_ns):
            return books.choose_path(model, prefill, decode, hit_tokens, now_ns)

    def pull(self, report: GroupReport, scheduler_boot_id: str) -> tuple[Delivery, ...] | None:
        """What is new for the group; None: its leader must say first what it goes on with, and nothing was taken."""
        if self._must_tell(report, scheduler_boot_id):
            return None
        with self._changing() as (books, now_ns):
            return books.pull(report, now_ns)

    def node_reported(self, report: NodeReport) -> tuple[Fence, ...]:
        with self._changing() as (books, now_ns):
            return books.node_reported(report, now_ns)

    def lose_group(self, name: str, boot_id: str) -> None:
        """That boot of its leader is known to be dead; another boot, and a group that is not known, are left alone."""
        group = self._cluster().group(name)
        if group is not None and group.boot_id == boot_id:
            with self._changing() as (books, now_ns):
                books.lose_group(name, now_ns)

    def lose_node(self, node: str) -> None:
        """It is said to be dead. One that reports goes on: it may be cut off from whoever says so. Nothing happens where this
        scheduler does not lead."""
        with suppress(NotLeading, ShuttingDown), self._changing() as (books, now_ns):
            known = self._cluster_of(books).nodes.get(node)
            if known is not None and now_ns - known.heard_ns > self.settings.limits.node_silent_ns // 2:
                books.lose_node(node, now_ns)

    def tick(self) -> None:
        """To be called about twice a second; nothing happens where this scheduler does not lead."""
        with suppress(NotLeading, ShuttingDown):
            with self._changing() as (books, now_ns):
                books.tick(now_ns)
            cluster = self._cluster_of(books)
            self._census = Census.of(cluster.groups(), cluster.nodes.values())

    # What is seen from outside.

    @property
    def cluster(self) -> Cluster | None:
        """To look at; None where this scheduler does not lead."""
        return None if self._books is None else self._cluster_of(self._books)

    def pull_again_ms(self) -> int:
        """When this leader should pull again."""
        settings, groups = self.settings, sum(self._census.groups.values())
        return self._interval_ms(
            settings.pull_interval_s, groups / settings.pulls_per_s, settings.limits.group_silent_ns
        )

    def report_again_ms(self) -> int:
        """When this node should report again."""
        settings, nodes = self.settings, self._census.nodes
        return self._interval_ms(
            settings.report_interval_s, nodes / settings.reports_per_s, settings.limits.node_silent_ns
        )

    def numbers(self, streams: int) -> SchedulerNumbers:
        cluster = self.cluster
        return SchedulerNumbers(
            policy=self.settings.policy,
            leads=self.leads,
            epoch=self.identity.epoch,
            leads_total=self.leads_total,
            counts=cluster.counts if cluster is not None else Counts(),
            waiting=cluster.waiting if cluster is not None else 0,
            live=cluster.live if cluster is not None else 0,
            census=self._census,
            waits=len(self.waits),
            streams=streams,
            calls=self.calls,
            journal=self._journal.numbers() if self._journal is not None else JournalNumbers(),
        )

    # Within.

    def _interval_ms(self, wanted_s: float, needed_s: float, silent_ns: int) -> int:
        """As wanted, or longer where so many callers need it; a quarter of the time at most after which one is taken for dead.

        Those that began at once would come at once for ever, and wait for each other: each is told another time, up to a
        quarter more or less.
        """
        self._turn += 1
        spread = 0.75 + 0.5 * (self._turn * GOLDEN % 1.0)
        return max(1, round(1000 * spread * min(max(wanted_s, needed_s), silent_ns / 4e9)))

    @staticmethod
    def _cluster_of(books: Cluster | Recorded) -> Cluster:
        return books if isinstance(books, Cluster) else books.cluster

    def _cluster(self) -> Cluster:
        return self._cluster_of(self._led())

    def _led(self) -> Cluster | Recorded:
        """Raises `NotLeading`, `ShuttingDown`."""
        if self._closed:
            raise _shutting_down()
        if self._books is None or not self.may_lead():
            raise NotLeading(leader=self.leader)
        return self._books

    @contextmanager
    def _changing(self) -> Iterator[tuple[Cluster | Recorded, int]]:
        """One call that changes the books: whoever waits for news of it is woken, also where it is refused."""
        books = self._led()
        try:
            yield books, self._chance.now_ns()
        except KvmoverError:
            raise
        except Exception:
            log.exception("the scheduler's books can't be trusted any more; it stops")
            self._on_fault()
            raise
        finally:
            for news in books.take_news():
                self.waits.tell(news.request_id)

    @contextmanager
    def _naming_itself(self) -> Iterator[None]:
        """A client that gave a request to this boot hears that it has ended here, and does not submit it again."""
        try:
            yield
        except UnknownRequest as error:
            error.details["scheduler_boot_id"] = self.identity.boot_id
            raise

    def _must_tell(self, report: GroupReport, scheduler_boot_id: str) -> bool:
        """A leader that has not heard of this boot, or that was lost meanwhile, says first what it goes on with."""
        group = self._cluster().group(report.group)
        is_known = group is not None and group.boot_id == report.boot_id
        if scheduler_boot_id == self.identity.boot_id and (is_known or self._asked.get(report.group) == report.boot_id):
            self._asked.pop(report.group, None)
            return False
        self._asked.pop(report.group, None)
        self._asked[report.group] = report.boot_id
        if len(self._asked) > self.settings.limits.engines_max:
            del self._asked[next(iter(self._asked))]
        return True


def _always() -> bool:
    return True


def _shutting_down() -> KvmoverError:
    return ShuttingDown("this scheduler stops")

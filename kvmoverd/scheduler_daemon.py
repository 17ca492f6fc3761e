"""Composition root of the scheduler's process: builds everything from the config in one place, takes it down in order."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import AsyncExitStack
from functools import partial

from kvmover_proto import scheduler_pb2_grpc
from kvmoverd.adapters.journal_file import JournalFile
from kvmoverd.adapters.membership.static import StaticMembership
from kvmoverd.adapters.observers.metrics_http import MetricsServer
from kvmoverd.adapters.observers.scheduler_metrics import registry_of
from kvmoverd.adapters.off_loop import off_loop
from kvmoverd.config_scheduler import JournalConfig, SchedulerFile
from kvmoverd.core.errors import ConfigError, ShuttingDown
from kvmoverd.core.scheduling.numbers import SchedulerNumbers
from kvmoverd.joining import election_of, membership_of
from kvmoverd.ports.membership import Member, Membership
from kvmoverd.rpc import scheduler_service, server
from kvmoverd.rpc.loop_lag import LoopLag
from kvmoverd.rpc.scheduler_office import Chance, Office, OfficeSettings
from kvmoverd.rpc.scheduler_service import SchedulerService
from kvmoverd.rpc.scheduler_streams import Streams

log = logging.getLogger(__name__)

TICK_S = 0.5
SKIPPED_MAX = 4
"""Looks for silent leaders that are left out one after the other because they are late: a scheduler that is always late looks
all the same."""
OPEN_S = 30.0
JOURNAL_S = 2.0
STOP_GRACE_S = 1.0
MESSAGE_BYTES_MAX = 32 << 20
"""A pull with all that a group holds is the largest."""
CALLS_SPARE = 256
"""Calls beside those that wait and those that report."""


class SchedulerDaemon:
    """One scheduler. `start` builds bottom up; `stop` takes down what was built, top down, in bounded time.

    Without an election it leads from the start. `lead`, `step_down` and `lose_node` are for the election and for membership.
    """

    def __init__(self, config: SchedulerFile) -> None:
        self.config = config
        self.broken = asyncio.Event()
        self.port = self.metrics_port = 0
        self._lag = LoopLag()
        self._began_ns = time.monotonic_ns()
        self._cut_short = False
        self._follows: str | None = None
        """The leader that the log has told of, "" for none that is known; None while this one leads."""
        self._built = AsyncExitStack()
        self._journal: JournalFile | None = None
        self._membership: Membership = StaticMembership({})

    async def start(self) -> None:
        """Raises `KvmoverError`; what was built by then is taken down by `stop`."""
        config = self.config
        self._journal = await self._open_journal(config.scheduler.journal)
        chance = Chance(time.monotonic_ns, time.time_ns, lambda: os.urandom(8).hex())
        self._office = Office(_settings(config), chance, self.broken.set, self._journal)
        self._streams = Streams(config.limits.nodes_max)
        await self._serve_metrics()
        await self._serve()
        await self._join()
        loop = asyncio.get_running_loop()
        for work in (self._lag.watch(), self._tick()):
            self._built.callback(loop.create_task(work).cancel)
        self._built.callback(self._close_office)
        log.info(
            "scheduler serves at %s, policy %s, %d models",
            config.scheduler.listen._replace(port=self.port),
            config.scheduler.policy,
            len(config.models),
        )

    async def stop(self) -> bool:
        """True when everyone was told and all was written; False when something had to be cut short."""
        await self._built.aclose()
        return not self._cut_short

    def lead(self, epoch: int) -> None:
        """This scheduler decides from here on, with empty books. Epochs rise.

        One that can't ends: it would be elected again and again, and keep others from it.
        """
        try:
            self._office.lead(epoch)
        except Exception:
            self.broken.set()
            raise
        self._follows = None
        log.info("this scheduler decides, epoch %d, boot %s", epoch, self.boot_id)

    @property
    def boot_id(self) -> str:
        """As daemons hear it: another one each time that this scheduler comes to lead."""
        return self._office.identity.boot_id

    def step_down(self, leader: str) -> None:
        """Another one decides, at this address; empty: not known who."""
        self._office.step_down(leader)
        if leader != self._follows:
            log.info("this scheduler stands by: %s", f"{leader} leads" if leader else "nobody is known to lead")
        self._follows = leader

    def lose_node(self, node: str) -> None:
        """It is known to be dead: what its engines had goes to others."""
        self._office.lose_node(node)

    async def _join(self) -> None:
        """With etcd the elected scheduler leads, and is told of nodes that leave; else this one leads."""
        etcd = self.config.membership.etcd
        if etcd is None:
            self.lead(0)
            return
        address = self.config.scheduler.advertise or str(self.config.scheduler.listen._replace(port=self.port))
        boot_id = self.boot_id
        election = await asyncio.to_thread(
            partial(election_of, etcd, address=address, boot_id=boot_id, on_lead=self.lead, on_follow=self.step_down)
        )
        membership = await asyncio.to_thread(membership_of, self.config.membership, {})
        self._membership = membership
        membership.watch(self._told)
        self._built.push_async_callback(membership.close)
        await membership.start(None)
        self._office.may_lead = election.leads
        self._built.push_async_callback(election.close)
        election.start()

    def _told(self, member: Member, there: bool) -> None:
        if not there:
            self.lose_node(member.node)

    async def _open_journal(self, settings: JournalConfig) -> JournalFile | None:
        if settings.path is None:
            return None
        make = partial(JournalFile, settings.path, bytes_max=settings.bytes_max, queue_max=settings.queue_max)
        try:
            journal = await off_loop(make, what="opening the decision log", timeout_s=OPEN_S)
        except OSError as error:
            raise ConfigError(f"scheduler.journal.path: {settings.path} can't be written: {error.strerror}") from error
        self._built.push_async_callback(self._close_journal, journal)
        return journal

    async def _close_journal(self, journal: JournalFile) -> None:
        if not await asyncio.to_thread(journal.stop, JOURNAL_S):
            self._cut_short = True
            log.warning("the decision log is not whole: %d lines were dropped", journal.numbers().dropped)

    async def _serve_metrics(self) -> None:
        listen = self.config.metrics.listen
        if listen is None:
            return
        metrics = MetricsServer(registry_of(self._numbers))
        self.metrics_port = await metrics.start(listen.host, listen.port)
        self._built.push_async_callback(metrics.stop)
        log.info("metrics at http://%s:%d/metrics", listen.host, self.metrics_port)

    async def _serve(self) -> None:
        config, limits = self.config, self.config.limits
        service = SchedulerService(self._office, self._streams, self._facts)
        started = await server.start(
            str(config.scheduler.listen),
            scheduler_service.SERVICE,
            lambda made: scheduler_pb2_grpc.add_SchedulerServicer_to_server(service, made),
            streams_max=config.waits_max + limits.nodes_max + CALLS_SPARE,
            always=scheduler_service.ALWAYS,
            options=(
                *server.keepalive(limits.node_silent_ns / 1e9),
                ("grpc.server.max_pending_requests", config.waits_max),
                ("grpc.server.max_pending_requests_hard_limit", 2 * config.waits_max),
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ),
        )
        self.port = started.port
        self._built.push_async_callback(started.stop, min(STOP_GRACE_S, config.shutdown.drain_s))

    def _close_office(self) -> None:
        """Whoever waits is told to ask elsewhere, and so is whoever asks now."""
        self._office.close()
        self._streams.end(lambda: ShuttingDown("this scheduler stops"))

    async def _tick(self) -> None:
        """After a time in which this process stood still nobody is taken for silent before what came meanwhile was read."""
        limits, loop, skipped = self.config.limits, asyncio.get_running_loop(), 0
        late_s = min(limits.group_silent_ns, limits.node_silent_ns) / 4e9
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            stood_s = loop.time() - due_s
            if stood_s > late_s and skipped < SKIPPED_MAX:
                skipped += 1
                log.warning("the scheduler stood still for %.1f s; it waits with calling others silent", stood_s)
                continue
            skipped = 0
            self._office.tick()

    def _numbers(self) -> SchedulerNumbers:
        return self._office.numbers(len(self._streams))

    def _facts(self) -> dict[str, object]:
        state = self._membership.state()
        return {
            "membership": {
                "kind": state.kind,
                "members": state.members,
                "silent_ms": round(1000 * state.silent_s),
                "why": state.why,
            },
            "uptime_ms": (time.monotonic_ns() - self._began_ns) // 1_000_000,
            "loop_lag_us_max": self._lag.max_us,
            "loop_lag_us_p99": self._lag.quantile_us(0.99),
            "loop_lags_over_1ms": self._lag.long_count,
        }


def _settings(config: SchedulerFile) -> OfficeSettings:
    asked = config.scheduler
    return OfficeSettings(
        models=config.models,
        policy=asked.policy,
        limits=config.limits,
        joint=config.joint,
        waits_max=config.waits_max,
        report_interval_s=asked.report_interval_s,
        pull_interval_s=asked.pull_interval_s,
        pulls_per_s=asked.pulls_per_s,
        reports_per_s=asked.reports_per_s,
    )

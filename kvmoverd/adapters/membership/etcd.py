"""Membership port over etcd: each daemon holds a key under a lease of its own, and all watch all keys.

etcd may go away at any time. The members that were known then go on being used, and nobody counts as gone before etcd has said
so: daemons find out about each other's deaths by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable

from kvmover_proto import etcd_pb2
from kvmoverd.adapters.membership import etcd_keys, etcd_wire
from kvmoverd.adapters.membership.etcd_keys import Keys
from kvmoverd.adapters.membership.etcd_lease import EtcdLease
from kvmoverd.adapters.membership.etcd_wire import EtcdAccess, EtcdRefused, EtcdUnreachable, EtcdWire
from kvmoverd.core.errors import ConfigError
from kvmoverd.ports.membership import Member, Told

log = logging.getLogger(__name__)

FIRST_READ_S = 5.0
PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 2.0
CLOSE_S = 2.0
PROGRESS_S = 30.0
"""A watch of which nothing is heard for so long is asked for the revision by a read, and opened anew if that fails."""


class EtcdMembership:
    """`ttl_s`: so long a node that has died is there."""

    def __init__(self, access: EtcdAccess, prefix: str, *, ttl_s: float, version: str = "") -> None:
        self._wire = EtcdWire(access)
        self._keys = Keys(prefix)
        self._ttl_s = ttl_s
        self._version = version
        self._members: dict[str, Member] = {}
        self._leader = ""
        self._told: list[Told] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._lease: EtcdLease | None = None
        self._read = asyncio.Event()
        self._heard_s = time.monotonic()
        self._failing = ""

    async def start(self, own: Member | None) -> None:
        """Returns when the members are known and this one is among them; without etcd after a while, with nobody known.

        Raises `ConfigError` when another daemon holds this node's name and goes on doing so, or when etcd refuses.
        """
        if own is not None:
            await self._register_first(own)
        self._tasks.append(asyncio.get_running_loop().create_task(self._follow()))
        if own is not None:
            self._tasks.append(asyncio.get_running_loop().create_task(self._stay(own)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_READ_S):
                await self._read.wait()

    def address_of(self, node: str) -> str | None:
        member = self._members.get(node)
        return None if member is None else member.address

    def nodes(self) -> list[str]:
        return list(self._members)

    def member(self, node: str) -> Member | None:
        return self._members.get(node)

    def watch(self, told: Told) -> None:
        self._told.append(told)

    def scheduler(self) -> str:
        return self._leader

    @property
    def silent_s(self) -> float:
        """For so long nothing is known of changes; 0 while etcd is watched."""
        return max(0.0, time.monotonic() - self._heard_s) if self._failing else 0.0

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                if self._lease is not None:
                    await self._lease.revoke()
        await self._wire.close()

    # This node among the others.

    async def _register_first(self, own: Member) -> None:
        """A former start of this daemon may have left its key: it goes with its lease. Raises `ConfigError`."""
        until_s = time.monotonic() + self._ttl_s + 2.0
        while True:
            try:
                lease, there = await self._try_to_register(own)
            except EtcdRefused as error:
                raise ConfigError(f"[membership.etcd]: {error}") from error
            except EtcdUnreachable as error:
                log.warning("%s; this node starts without, and joins when etcd is there", error)
                return
            if lease is not None:
                self._lease = lease
                return
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"node.name is {own.node!r}, which a daemon at {there.address if there else 'unknown'} holds, boot "
                    f"{there.boot_id if there else 'unknown'}: two daemons can't have one name"
                )
            await asyncio.sleep(min(0.5, self._ttl_s / 4))

    async def _try_to_register(self, own: Member) -> tuple[EtcdLease | None, Member | None]:
        """The lease, or who holds the name. Raises `EtcdUnreachable`, `EtcdRefused`."""
        lease = await EtcdLease.grant(self._wire, self._ttl_s)
        value = etcd_keys.member_value(own, self._version)
        key = self._keys.node(own.node)
        made = await etcd_keys.make(self._wire, key, value, lease.lease_id)
        if not made.is_ours and made.value == value:
            # Under a lease that this start of the daemon has lost, and that has not expired yet.
            made = await etcd_keys.make(self._wire, key, value, lease.lease_id, over=made.revision)
        if made.is_ours:
            return lease, None
        await lease.revoke()
        return None, etcd_keys.member_of(own.node, made.value)

    async def _stay(self, own: Member) -> None:
        """Lost, it registers again; the daemon serves meanwhile as ever."""
        while True:
            if self._lease is not None:
                why = await self._lease.keep()
                self._lease = None
                log.warning("this node's lease in etcd is lost: %s; it registers again", why)
            await self._register_again(own)
            log.info("this node is registered in etcd")

    async def _register_again(self, own: Member) -> None:
        pause_s, told = PAUSE_MIN_S, ""
        while self._lease is None:
            try:
                self._lease, there = await self._try_to_register(own)
                why = f"its name is held by {there}" if there is not None else ""
            except (EtcdUnreachable, EtcdRefused) as error:
                why = str(error)
            if self._lease is None:
                if not told:
                    log.warning("this node is not registered in etcd: %s", why)
                told = why
                await asyncio.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    # The others.

    async def _follow(self) -> None:
        """Reads all, then watches from there on; after any fault again from the beginning."""
        pause_s = PAUSE_MIN_S
        while True:
            try:
                revision = await self._read_all()
                pause_s = PAUSE_MIN_S
                await self._watch_from(revision + 1)
            except (EtcdUnreachable, EtcdRefused, TimeoutError) as error:
                if not self._failing:
                    log.warning("etcd is not watched: %s; the members known go on being used", error)
                self._failing = str(error) or type(error).__name__
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    async def _read_all(self) -> int:
        """The revision that was read. Raises `EtcdUnreachable`, `EtcdRefused`."""
        begin, end = self._keys.all
        request = etcd_pb2.RangeRequest(key=begin, range_end=end)
        answer = await self._wire.call(etcd_wire.RANGE, request, etcd_pb2.RangeResponse)
        found = {kv.key: kv.value for kv in answer.kvs}
        for name in [name for name in self._members if self._keys.node(name) not in found]:
            self._gone(name)
        for key, value in found.items():
            self._changed(key, value)
        if self._keys.leader not in found:
            self._leader = ""
        self._heard()
        self._read.set()
        return int(answer.header.revision)

    async def _watch_from(self, revision: int) -> None:
        """Returns when etcd ends the watch. Raises `EtcdUnreachable`, `EtcdRefused`, `TimeoutError`."""
        begin, end = self._keys.all
        wanted = etcd_pb2.WatchCreateRequest(key=begin, range_end=end, start_revision=revision, progress_notify=True)
        reply = etcd_pb2.WatchResponse
        async with self._wire.stream(etcd_wire.WATCH, etcd_pb2.WatchRequest(create=wanted), reply) as stream:
            reading = asyncio.ensure_future(stream.read())
            try:
                while True:
                    done, _ = await asyncio.wait({reading}, timeout=PROGRESS_S)
                    if not done:
                        await self._wire.call(etcd_wire.RANGE, etcd_pb2.RangeRequest(key=begin), etcd_pb2.RangeResponse)
                        continue
                    answer = reading.result()
                    if not isinstance(answer, reply) or answer.canceled or answer.compact_revision:
                        return
                    self._take(answer.events)
                    reading = asyncio.ensure_future(stream.read())
            finally:
                reading.cancel()

    def _take(self, events: Iterable[etcd_pb2.Event]) -> None:
        self._heard()
        for event in events:
            if event.type == 0:
                self._changed(event.kv.key, event.kv.value)
            elif event.kv.key == self._keys.leader:
                self._leader = ""
            elif name := self._keys.node_of(event.kv.key):
                self._gone(name)

    def _changed(self, key: bytes, value: bytes) -> None:
        if key == self._keys.leader:
            self._leader, _ = etcd_keys.leader_of(value)
            return
        name = self._keys.node_of(key)
        member = etcd_keys.member_of(name, value) if name else None
        if member is None or member == self._members.get(name):
            return
        self._gone(name)
        for other in [other for other in self._members.values() if other.address == member.address]:
            # Two can't listen at one address: the older one is dead, and its lease has not expired yet.
            self._gone(other.node)
        self._members[name] = member
        self._tell(member, there=True)

    def _gone(self, name: str) -> None:
        member = self._members.pop(name, None)
        if member is not None:
            self._tell(member, there=False)

    def _tell(self, member: Member, *, there: bool) -> None:
        for told in self._told:
            try:
                told(member, there)
            except Exception:
                log.exception("whoever was told of member %s failed", member.node)

    def _heard(self) -> None:
        self._heard_s = time.monotonic()
        if self._failing:
            log.info("etcd is watched again")
            self._failing = ""

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
from kvmoverd.adapters.membership.etcd_wire import EtcdAccess, EtcdRefused, EtcdStream, EtcdUnreachable, EtcdWire
from kvmoverd.core.errors import ConfigError
from kvmoverd.ports.membership import Member, MembershipState, Told

log = logging.getLogger(__name__)

FIRST_READ_S = 5.0
PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 2.0
CLOSE_S = 2.0
PROGRESS_S = 5.0
"""A watch of which nothing is heard for so long is asked whether it lives, and opened anew if it does not answer."""
MEMBERS_MAX = 65_536


class EtcdMembership:
    """`ttl_s`: so long a node that has died is there."""

    def __init__(self, access: EtcdAccess, prefix: str, *, ttl_s: float, version: str = "") -> None:
        self._wire = EtcdWire(access)
        self._keys = Keys(prefix)
        self._ttl_s = ttl_s
        self._version = version
        self._members: dict[str, Member] = {}
        self._name_at: dict[str, str] = {}
        self._leader = ""
        self._told: list[Told] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._lease: EtcdLease | None = None
        self._untold = ""
        """Why this node is not registered; empty: it is, or is not to be."""
        self._own_key = b""
        self._made_at = self._deleted_at = 0
        """Revisions at which this node's key was made, and was last seen to be gone: what is told late of a former key is not
        of this one."""
        self._deleted = asyncio.Event()
        self._read = asyncio.Event()
        self._heard_s = time.monotonic()
        self._failing = ""
        self._is_refused = False
        self._refusal = ""

    async def start(self, own: Member | None) -> None:
        """Returns when the members are known and this one is among them; without etcd after a while, with nobody known.

        Raises `ConfigError` when another daemon holds this node's name and goes on doing so, or when etcd refuses; `close` is to
        be called then, too.
        """
        if own is not None:
            self._own_key = self._keys.node(own.node)
            await self._register_first(own)
        self._tasks.append(asyncio.get_running_loop().create_task(self._follow()))
        if own is not None:
            self._tasks.append(asyncio.get_running_loop().create_task(self._stay(own)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_READ_S):
                await self._read.wait()
        if self._refusal:
            raise ConfigError(f"[membership.etcd]: {self._refusal}")

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

    def state(self) -> MembershipState:
        why = self._failing or self._untold
        return MembershipState("etcd", len(self._members), self.silent_s, is_told=not self._untold, why=why)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if self._tasks:
                    await asyncio.wait(self._tasks)
                if self._lease is not None:
                    await self._lease.revoke()
        await self._wire.close()

    # This node among the others.

    async def _register_first(self, own: Member) -> None:
        """A former start of this daemon may have left its key: it goes with its lease. Raises `ConfigError`."""
        begun_s = time.monotonic()
        while True:
            try:
                lease, there, granted_s = await self._try_to_register(own)
            except EtcdRefused as error:
                raise ConfigError(f"[membership.etcd]: {error}") from error
            except EtcdUnreachable as error:
                self._untold = str(error)
                log.warning("%s; this node starts without, and joins when etcd is there", error)
                return
            if lease is not None:
                self._lease = lease
                return
            if time.monotonic() > begun_s + granted_s + 2.0:
                raise ConfigError(
                    f"node.name is {own.node!r}, which a daemon at {there.address if there else 'unknown'} holds, boot "
                    f"{there.boot_id if there else 'unknown'}: two daemons can't have one name"
                )
            await asyncio.sleep(min(0.5, self._ttl_s / 4))

    async def _try_to_register(self, own: Member) -> tuple[EtcdLease | None, Member | None, float]:
        """The lease, or who holds the name; and how long etcd lets leases live. Raises `EtcdUnreachable`, `EtcdRefused`."""
        lease = await EtcdLease.grant(self._wire, self._ttl_s)
        value = etcd_keys.member_value(own, self._version)
        key = self._keys.node(own.node)
        made = await etcd_keys.make(self._wire, key, value, lease.lease_id)
        if not made.is_ours and made.value == value:
            # Under a lease that this start of the daemon has lost, and that has not expired yet.
            made = await etcd_keys.make(self._wire, key, value, lease.lease_id, over=made.revision)
        if made.is_ours:
            self._made_at = made.revision
            return lease, None, lease.granted_s
        await lease.revoke()
        return None, etcd_keys.member_of(own.node, made.value), lease.granted_s

    async def _stay(self, own: Member) -> None:
        """Lost, it registers again; the daemon serves meanwhile as ever."""
        while True:
            if self._lease is not None:
                why = await self._lost(self._lease)
                self._lease, self._untold = None, why
                log.warning("this node is not registered in etcd any more: %s; it registers again", why)
            await self._register_again(own)
            self._untold = ""
            log.info("this node is registered in etcd")

    async def _lost(self, lease: EtcdLease) -> str:
        """Returns when the lease is lost, or what it held was deleted by somebody; says why."""
        if self._deleted_at <= self._made_at:
            self._deleted.clear()
        keeping, deleted = asyncio.ensure_future(lease.keep()), asyncio.ensure_future(self._deleted.wait())
        try:
            await asyncio.wait({keeping, deleted}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                return keeping.result()
        finally:
            keeping.cancel()
            deleted.cancel()
        await lease.revoke()
        return "its key was deleted"

    async def _register_again(self, own: Member) -> None:
        pause_s, told = PAUSE_MIN_S, ""
        while self._lease is None:
            try:
                self._lease, there, _ = await self._try_to_register(own)
                kind, why = "held", f"its name is held by {there}"
            except (EtcdUnreachable, EtcdRefused) as error:
                kind, why = error.reason, str(error)
            if self._lease is None:
                if kind != told:
                    log.warning("this node is not registered in etcd: %s", why)
                told, self._untold = kind, why
                await asyncio.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    # The others.

    async def _follow(self) -> None:
        """Reads all, then watches from there on; after any fault again from the beginning."""
        pause_s = PAUSE_MIN_S
        while True:
            begun_s = time.monotonic()
            try:
                await self._watch_from(await self._read_all() + 1)
            except (EtcdUnreachable, EtcdRefused, TimeoutError) as error:
                self._fail(error)
            if time.monotonic() - begun_s > PAUSE_MAX_S:
                pause_s = PAUSE_MIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    def _fail(self, error: Exception) -> None:
        why = str(error) or "the watch does not answer"
        if not self._failing or isinstance(error, EtcdRefused) != self._is_refused:
            log.warning("etcd is not watched: %s; the members known go on being used", why)
        self._failing, self._is_refused = why, isinstance(error, EtcdRefused)
        if isinstance(error, EtcdRefused) and not self._read.is_set():
            self._refusal = why
            self._read.set()

    async def _read_all(self) -> int:
        """The revision that was read. Raises `EtcdUnreachable`, `EtcdRefused`."""
        begin, end = self._keys.all
        request = etcd_pb2.RangeRequest(key=begin, range_end=end)
        answer = await self._wire.call(etcd_wire.RANGE, request, etcd_pb2.RangeResponse)
        wanted = self._wanted(answer.kvs)
        for name in [name for name in self._members if name not in wanted]:
            self._gone(name)
        for member in wanted.values():
            self._there(member)
        if self._own_key not in {kv.key for kv in answer.kvs}:
            self._own_is_gone(answer.header.revision)
        self._leader = next((etcd_keys.leader_of(kv.value)[0] for kv in answer.kvs if kv.key == self._keys.leader), "")
        self._heard()
        self._read.set()
        return int(answer.header.revision)

    def _wanted(self, kvs: Iterable[etcd_pb2.KeyValue]) -> dict[str, Member]:
        """In the order in which they were written: of two at one address the later one, as those have it who watched."""
        wanted: dict[str, Member] = {}
        name_at: dict[str, str] = {}
        for kv in sorted(kvs, key=lambda kv: kv.mod_revision):
            name = self._keys.node_of(kv.key)
            # Whatever somebody has put over a key of ours does not take its node away.
            member = (etcd_keys.member_of(name, kv.value) or self._members.get(name)) if name else None
            if member is not None:
                wanted.pop(name_at.get(member.address, ""), None)
                name_at[member.address] = name
                wanted[name] = member
        return wanted

    async def _watch_from(self, revision: int) -> None:
        """Returns when etcd ends the watch. Raises `EtcdUnreachable`, `EtcdRefused`, `TimeoutError`."""
        begin, end = self._keys.all
        wanted = etcd_pb2.WatchCreateRequest(key=begin, range_end=end, start_revision=revision, progress_notify=True)
        reply = etcd_pb2.WatchResponse
        async with self._wire.stream(etcd_wire.WATCH, etcd_pb2.WatchRequest(create=wanted), reply) as stream:
            while True:
                answer = await self._next(stream)
                if not isinstance(answer, reply) or answer.canceled or answer.compact_revision:
                    return
                self._take(answer.events)

    async def _next(self, stream: EtcdStream) -> object:
        """What the watch says next. Raises `TimeoutError` when it does not answer even if it is asked to."""
        reading = asyncio.ensure_future(stream.read())
        try:
            done, _ = await asyncio.wait({reading}, timeout=PROGRESS_S)
            if not done:
                async with asyncio.timeout(self._wire.access.timeout_s):
                    await stream.write(etcd_pb2.WatchRequest(progress=etcd_pb2.WatchProgressRequest()))
                    await asyncio.wait({reading})
            return reading.result()
        finally:
            reading.cancel()

    def _take(self, events: Iterable[etcd_pb2.Event]) -> None:
        self._heard()
        for event in events:
            key, name = event.kv.key, self._keys.node_of(event.kv.key)
            is_put = event.type == 0
            if key == self._keys.leader:
                self._leader = etcd_keys.leader_of(event.kv.value)[0] if is_put else ""
            elif is_put and name and (member := etcd_keys.member_of(name, event.kv.value)) is not None:
                self._there(member)
            elif not is_put and name:
                self._gone(name)
                if key == self._own_key:
                    self._own_is_gone(event.kv.mod_revision)

    def _own_is_gone(self, revision: int) -> None:
        if revision > self._made_at:
            self._deleted_at = revision
            self._deleted.set()

    def _there(self, member: Member) -> None:
        name = member.node
        if member == self._members.get(name):
            return
        self._gone(name)
        # Two can't listen at one address: the older one is dead, and its lease has not expired yet.
        self._gone(self._name_at.get(member.address, ""))
        if len(self._members) >= MEMBERS_MAX:
            log.warning(
                "member %s at %s is left out: %d are known, and no more can be", name, member.address, MEMBERS_MAX
            )
            return
        self._members[name] = member
        self._name_at[member.address] = name
        self._tell(member, there=True)

    def _gone(self, name: str) -> None:
        member = self._members.pop(name, None)
        if member is not None:
            del self._name_at[member.address]
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

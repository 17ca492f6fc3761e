"""Which scheduler leads: whoever made the leader's key, for as long as its lease lives. Its epoch is the key's create revision,
so that a later leader always has a higher one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvmover_proto import etcd_pb2
from kvmoverd.adapters.membership import etcd_keys, etcd_wire
from kvmoverd.adapters.membership.etcd_keys import Keys
from kvmoverd.adapters.membership.etcd_lease import EtcdLease, revoke
from kvmoverd.adapters.membership.etcd_wire import EtcdAccess, EtcdRefused, EtcdUnreachable, EtcdWire

log = logging.getLogger(__name__)

PAUSE_S = 0.2
LOOK_S = 1.0
"""The key is looked at so often beside watching it."""
CLOSE_S = 2.0


class EtcdElection:
    """`on_lead` is told the epoch, `on_follow` the leader's address, empty when it is not known."""

    def __init__(
        self,
        access: EtcdAccess,
        prefix: str,
        *,
        address: str,
        boot_id: str,
        ttl_s: float,
        on_lead: Callable[[int], None],
        on_follow: Callable[[str], None],
    ) -> None:
        self._wire = EtcdWire(access)
        self._key = Keys(prefix).leader
        self._value = etcd_keys.leader_value(address, boot_id)
        self._ttl_s = ttl_s
        self._on_lead = on_lead
        self._on_follow = on_follow
        self._lease: EtcdLease | None = None
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def leads(self) -> bool:
        """Nobody else can lead now. To be asked before each word that counts: a process that stood still may not know yet that
        its time is over."""
        return self._lease is not None and self._lease.left_s > 0

    async def close(self) -> None:
        """Another one may lead at once. Without etcd it ends after `CLOSE_S` and a bit, and the lease when its time is over."""
        self._lease = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_S)
        await self._wire.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._campaign()
                self._failing = False
            except (EtcdUnreachable, EtcdRefused) as error:
                if not self._failing:
                    log.warning("no scheduler can be elected: %s", error)
                    self._on_follow("")
                self._failing = True
                await asyncio.sleep(PAUSE_S)
            except Exception:
                log.exception("whoever was told who leads failed; this scheduler stands for election again")
                await asyncio.sleep(PAUSE_S)

    async def _campaign(self) -> None:
        """Until this one leads no more, or the one that it follows is gone. Raises `EtcdUnreachable`, `EtcdRefused`."""
        lease = await EtcdLease.grant(self._wire, self._ttl_s)
        keeping = asyncio.ensure_future(lease.keep())
        try:
            made = await etcd_keys.make(self._wire, self._key, self._value, lease.lease_id)
            if made.is_ours and lease.left_s > 0:
                await self._lead(lease, made.revision, keeping)
                return
        finally:
            keeping.cancel()
            await lease.revoke()
        if made.value == self._value:
            # Made by a call whose answer was lost, or under a lease that was lost before it had expired: nobody leads by it.
            await revoke(self._wire, made.lease_id)
            return
        address, _ = etcd_keys.leader_of(made.value)
        self._on_follow(address)
        await self._until_gone(address)

    async def _lead(self, lease: EtcdLease, epoch: int, keeping: asyncio.Future[str]) -> None:
        self._lease = lease
        watching = asyncio.ensure_future(self._until_not_ours(epoch))
        try:
            log.info("this scheduler leads, epoch %d", epoch)
            self._on_lead(epoch)
            done, _ = await asyncio.wait({keeping, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            self._lease = None
        log.warning("this scheduler does not lead any more: %s", done.pop().result())
        self._on_follow("")

    async def _until_not_ours(self, epoch: int) -> str:
        """Somebody may delete the key by hand, or etcd lose it, while the lease lives on; returns why it is not ours any more."""
        while True:
            try:
                answer = await self._wire.call(
                    etcd_wire.RANGE, etcd_pb2.RangeRequest(key=self._key), etcd_pb2.RangeResponse
                )
            except (EtcdUnreachable, EtcdRefused):
                # As long as the lease is kept, or can be: its time is watched for itself.
                await asyncio.sleep(PAUSE_S)
                continue
            if not answer.kvs or answer.kvs[0].create_revision != epoch:
                return "its key in etcd was taken away"
            await self._change(int(answer.header.revision) + 1)

    async def _until_gone(self, address: str) -> None:
        """The leader's key is watched, and looked at now and then. Raises `EtcdUnreachable`, `EtcdRefused`."""
        while True:
            request = etcd_pb2.RangeRequest(key=self._key)
            answer = await self._wire.call(etcd_wire.RANGE, request, etcd_pb2.RangeResponse)
            if not answer.kvs:
                return
            now, _ = etcd_keys.leader_of(answer.kvs[0].value)
            if now != address:
                address = now
                self._on_follow(address)
            await self._change(int(answer.header.revision) + 1)

    async def _change(self, revision: int) -> None:
        """Returns at the next change of the key, or after a while."""
        wanted = etcd_pb2.WatchCreateRequest(key=self._key, start_revision=revision)
        reply = etcd_pb2.WatchResponse
        try:
            async with (
                asyncio.timeout(LOOK_S),
                self._wire.stream(etcd_wire.WATCH, etcd_pb2.WatchRequest(create=wanted), reply) as stream,
            ):
                while isinstance(answer := await stream.read(), reply):
                    if answer.events:
                        return
                    if answer.canceled:
                        break
                await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            return
        except EtcdUnreachable:
            await asyncio.sleep(PAUSE_S)

"""A lease in etcd that is kept alive, and known to be lost before anybody else can know it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

from kvmover_proto import etcd_pb2
from kvmoverd.adapters.membership import etcd_wire
from kvmoverd.adapters.membership.etcd_wire import EtcdRefused, EtcdUnreachable, EtcdWire

SAFE_SHARE = 2 / 3
"""Of its time after which a lease that nobody has confirmed counts as lost: the rest is for clocks that run apart, and for who
holds it to stop."""
KEEP_SHARE = 1 / 4
PATIENCE_MIN_S = 0.05


class EtcdLease:
    """Made by `grant`. `keep` keeps it alive until it is lost. Times count from when what was answered had been *sent*."""

    def __init__(self, wire: EtcdWire, lease_id: int, ttl_s: float, sent_s: float, granted_s: float) -> None:
        self.lease_id = lease_id
        self.granted_s = granted_s
        """etcd has a least time of its own, which may be longer than what was asked for."""
        self._wire = wire
        self._ttl_s = ttl_s
        self._confirmed_s = sent_s
        self._is_over = False

    @classmethod
    async def grant(cls, wire: EtcdWire, ttl_s: float) -> EtcdLease:
        """Raises `EtcdUnreachable`, `EtcdRefused`."""
        sent_s = _now_s()
        request = etcd_pb2.LeaseGrantRequest(ttl_s=math.ceil(ttl_s))
        answer = await wire.call(etcd_wire.GRANT, request, etcd_pb2.LeaseGrantResponse)
        if answer.error or not answer.id:
            raise EtcdRefused(f"etcd grants no lease: {answer.error}"[:512])
        return cls(wire, answer.id, min(ttl_s, float(answer.ttl_s)), sent_s, float(answer.ttl_s))

    @property
    def left_s(self) -> float:
        """For so long it is surely held; 0 and less: it counts as lost."""
        return -math.inf if self._is_over else self._confirmed_s + self._ttl_s * SAFE_SHARE - _now_s()

    async def keep(self) -> str:
        """Returns when the lease is lost, and says why."""
        why = "etcd has not answered in time"
        while self.left_s > 0:
            try:
                async with asyncio.timeout(self.left_s) as limit:
                    why = await self._keep_over_one_stream(limit)
            except TimeoutError:
                return why
            except (EtcdUnreachable, EtcdRefused) as error:
                why = str(error)
                await asyncio.sleep(min(0.1, max(0.0, self.left_s)))
            else:
                return why
        return why

    async def _keep_over_one_stream(self, limit: asyncio.Timeout) -> str:
        """Returns why there is no lease any more. `limit` moves with each confirmation. Raises `EtcdUnreachable`."""
        request = etcd_pb2.LeaseKeepAliveRequest(id=self.lease_id)
        sent_s = _now_s()
        reply = etcd_pb2.LeaseKeepAliveResponse
        async with self._wire.stream(etcd_wire.KEEP_ALIVE, request, reply, within_s=self._patience_s()) as stream:
            while True:
                async with asyncio.timeout(self._patience_s()):
                    answer = await stream.read()
                if not isinstance(answer, reply):
                    raise EtcdUnreachable("etcd has ended the stream that keeps a lease")
                if answer.ttl_s <= 0:
                    self._is_over = True
                    return "etcd says that it has expired"
                self._ttl_s = min(self._ttl_s, float(answer.ttl_s))
                self._confirmed_s = sent_s
                limit.reschedule(asyncio.get_running_loop().time() + self.left_s)
                await asyncio.sleep(self._ttl_s * KEEP_SHARE)
                sent_s = _now_s()
                await stream.write(request)

    def _patience_s(self) -> float:
        """For a stream that hangs: there must be time left to try others, at the next endpoints."""
        return min(self._wire.access.timeout_s, max(PATIENCE_MIN_S, self.left_s / 2))

    async def revoke(self) -> None:
        """What it holds is gone at once; without an answer it goes when the lease expires."""
        self._is_over = True
        await revoke(self._wire, self.lease_id)


def _now_s() -> float:
    """Goes on while the machine sleeps, as etcd's clock does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def revoke(wire: EtcdWire, lease_id: int) -> None:
    """Does not say whether it could: there may be none any more, or no etcd."""
    with contextlib.suppress(EtcdUnreachable, EtcdRefused):
        await wire.call(etcd_wire.REVOKE, etcd_pb2.LeaseRevokeRequest(id=lease_id), etcd_pb2.LeaseRevokeResponse)

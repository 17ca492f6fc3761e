"""A lease in a real etcd: known to be lost before anybody else can know it, and kept as long as any endpoint answers."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import grpc.aio
import pytest
from cable_kit import cable
from etcd_kit import PREFIX, TTL_S, Etcd, access, needs_etcd, running, until, wire_of

from kvmover_proto import etcd_pb2
from kvmoverd.adapters.membership import etcd_keys, etcd_wire
from kvmoverd.adapters.membership.etcd_lease import SAFE_SHARE, EtcdLease
from kvmoverd.adapters.membership.etcd_wire import EtcdUnreachable, EtcdWire

KEY = f"{PREFIX}/held".encode()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running(tmp_path_factory.mktemp("etcd")) as made:
        yield made


async def is_there(wire: EtcdWire) -> bool:
    answer = await wire.call(etcd_wire.RANGE, etcd_pb2.RangeRequest(key=KEY), etcd_pb2.RangeResponse)
    return bool(answer.kvs)


@needs_etcd
async def test_a_lease_that_is_kept_lives_on_past_its_time(etcd: Etcd) -> None:
    async with wire_of(etcd) as wire:
        lease = await EtcdLease.grant(wire, TTL_S)
        assert (await etcd_keys.make(wire, KEY, b"x", lease.lease_id)).is_ours
        keeping = asyncio.ensure_future(lease.keep())
        least_s = TTL_S
        until_s = time.monotonic() + 1.5 * TTL_S
        while time.monotonic() < until_s:
            least_s = min(least_s, lease.left_s)
            await asyncio.sleep(0.01)
        assert await is_there(wire)
        assert not keeping.done()
        assert 0.0 < least_s < lease.granted_s * SAFE_SHARE
        await lease.revoke()
        assert lease.left_s < 0
        assert not await is_there(wire)
        assert await asyncio.wait_for(keeping, 2.0)


@needs_etcd
async def test_a_lease_counts_as_lost_before_its_key_is_gone(etcd: Etcd) -> None:
    async with wire_of(etcd) as wire, cable(etcd.port) as line:
        behind = EtcdWire(access(line.endpoint))
        lease = await EtcdLease.grant(behind, TTL_S)
        await etcd_keys.make(behind, KEY, b"x", lease.lease_id)
        keeping = asyncio.ensure_future(lease.keep())
        await asyncio.sleep(0.7)
        line.hold()
        await asyncio.wait_for(keeping, TTL_S)
        lost_s = time.monotonic()
        assert lease.left_s <= 0
        assert await is_there(wire)
        while await is_there(wire):
            assert time.monotonic() < lost_s + TTL_S + 3.0
            await asyncio.sleep(0.01)
        assert time.monotonic() - lost_s > TTL_S * (1 - SAFE_SHARE) / 2
        await behind.close()


@needs_etcd
async def test_a_lease_whose_stream_hangs_is_kept_through_another_endpoint(etcd: Etcd) -> None:
    async with cable(etcd.port) as line:
        wire = EtcdWire(access(line.endpoint, etcd.endpoint, timeout_s=2.0))
        lease = await EtcdLease.grant(wire, TTL_S)
        await etcd_keys.make(wire, KEY, b"x", lease.lease_id)
        keeping = asyncio.ensure_future(lease.keep())
        await asyncio.sleep(0.2)
        line.hold()
        until_s = time.monotonic() + 1.5 * TTL_S
        while time.monotonic() < until_s:
            assert lease.left_s > 0, "though one call may take longer than the lease has left"
            await asyncio.sleep(0.01)
        assert not keeping.done()
        keeping.cancel()
        await lease.revoke()
        await wire.close()


@needs_etcd
async def test_a_lease_is_kept_over_a_short_halt_of_etcd(etcd: Etcd) -> None:
    async with wire_of(etcd) as wire:
        lease = await EtcdLease.grant(wire, 6.0)
        keeping = asyncio.ensure_future(lease.keep())
        await asyncio.sleep(0.1)
        etcd.signal(signal.SIGSTOP)
        await asyncio.sleep(2.5)
        etcd.signal(signal.SIGCONT)
        await until(lambda: lease.left_s > 3.0)
        assert not keeping.done()
        keeping.cancel()
        await lease.revoke()


@needs_etcd
async def test_a_revoke_of_what_is_not_there_and_without_etcd_is_quiet(etcd: Etcd) -> None:
    async with wire_of(etcd) as wire:
        lease = await EtcdLease.grant(wire, TTL_S)
        await lease.revoke()
        await lease.revoke()
        await wire.close()
    away = EtcdWire(access("localhost:1"))
    await EtcdLease(away, 5, TTL_S, 0.0, TTL_S).revoke()
    with pytest.raises(EtcdUnreachable, match="localhost:1"):
        await EtcdLease.grant(away, TTL_S)
    await away.close()


class Shortening:
    """An etcd that grants what is asked for, and confirms ever less: no real one can be made to."""

    def __init__(self) -> None:
        self.ttl_s = 60
        self.kept = 0

    def grant(self, request: etcd_pb2.LeaseGrantRequest, _: object) -> etcd_pb2.LeaseGrantResponse:
        return etcd_pb2.LeaseGrantResponse(id=7, ttl_s=request.ttl_s)

    async def keep(
        self, requests: AsyncIterator[etcd_pb2.LeaseKeepAliveRequest], _: object
    ) -> AsyncIterator[etcd_pb2.LeaseKeepAliveResponse]:
        async for request in requests:
            self.kept += 1
            yield etcd_pb2.LeaseKeepAliveResponse(id=request.id, ttl_s=self.ttl_s)


@pytest.fixture
async def shortening() -> AsyncIterator[tuple[Shortening, EtcdWire]]:
    served = Shortening()
    server = grpc.aio.server()
    handlers = {
        "LeaseGrant": grpc.unary_unary_rpc_method_handler(
            served.grant, etcd_pb2.LeaseGrantRequest.FromString, etcd_pb2.LeaseGrantResponse.SerializeToString
        ),
        "LeaseKeepAlive": grpc.stream_stream_rpc_method_handler(
            served.keep, etcd_pb2.LeaseKeepAliveRequest.FromString, etcd_pb2.LeaseKeepAliveResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("etcdserverpb.Lease", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    wire = EtcdWire(access(f"127.0.0.1:{port}"))
    yield served, wire
    await wire.close()
    await server.stop(None)


async def test_a_lease_that_etcd_shortens_is_held_for_the_shorter_time_and_kept_more_often(
    shortening: tuple[Shortening, EtcdWire],
) -> None:
    served, wire = shortening
    served.ttl_s = 1
    lease = await EtcdLease.grant(wire, 60.0)
    assert lease.left_s > 30
    keeping = asyncio.ensure_future(lease.keep())
    await until(lambda: served.kept >= 3, served.__dict__)
    assert not keeping.done()
    assert 0 < lease.left_s < 1.0
    served.ttl_s = 0
    assert await asyncio.wait_for(keeping, 2.0)
    assert lease.left_s < 0

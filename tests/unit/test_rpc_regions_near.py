"""Regions whose engine says where they are used, and devices that are told of a region before anybody uses it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from rpc_kit import LAYERS, SEGMENTS, TOKENS, Engine, refused, rpc_kit

from kvmover_client import wire
from kvmover_client.memory import paged_geometry
from kvmover_client.words import Layout
from kvmover_proto import engine_pb2
from kvmoverd.core.errors import BadRegion
from kvmoverd.node import node
from kvmoverd.ports.memory import EngineMemory, Memory, Near
from kvmoverd.rpc import convert

GPU = "0000:3b:00.0"


class Devices:
    """Keeps what they are told of; `refusal` is raised, `gate` waited for."""

    def __init__(self) -> None:
        self.told: list[tuple[Memory, Near]] = []
        self.gone: list[Memory] = []
        self.refusal: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[int] = set()

    def adopt(self, memory: Memory, near: Near) -> None:
        assert self.gate.wait(5.0)
        if self.refusal is not None:
            raise self.refusal
        self.threads.add(threading.get_ident())
        self.told.append((memory, near))
        assert isinstance(memory, EngineMemory)
        memory.on_close(lambda: self.gone.append(memory))


async def region(engine: Engine, **near: Any) -> Any:
    """RegisterRegion of a new descriptor, which is not waited for."""
    geometry = paged_geometry(Layout(TOKENS, (SEGMENTS,) * LAYERS), 8)
    ticket = await engine.pass_fd(geometry.size_bytes)
    request = engine_pb2.RegisterRegionRequest(
        fd_ticket=ticket, fingerprint=engine.fingerprint, layers=wire.region_layers(geometry), **near
    )
    return engine.ask("RegisterRegion", request)


def test_where_memory_is_used_comes_in_as_sysfs_writes_it() -> None:
    def near(**fields: Any) -> Near:
        return convert.near_of(engine_pb2.RegisterRegionRequest(**fields))

    assert near() == Near(None, None)
    assert near(gpu_pci_address="00000000:3B:00.0", numa_node=0) == Near(GPU, 0)
    assert near(cuda=engine_pb2.CudaMemory(pci_address="3b:00.0")) == Near(GPU, None)
    for fields, words in (
        ({"gpu_pci_address": "gpu0"}, "gpu_pci_address: 'gpu0' is no PCI address"),
        ({"numa_node": 1_024}, "numa_node is 1024, must be 0 to 1023"),
    ):
        with pytest.raises(BadRegion, match=words):
            near(**fields)


async def test_devices_are_told_beside_the_loop_before_the_region_is_known_and_hear_when_it_goes(
    tmp_path: Path,
) -> None:
    devices = Devices()
    async with rpc_kit(tmp_path) as kit:
        kit.node._adopt_region = devices.adopt
        engine = await kit.engine()
        reply = await (await region(engine, gpu_pci_address="3B:00.0", numa_node=1))
        assert [near for _, near in devices.told] == [Near(), Near(GPU, 1)]
        assert threading.get_ident() not in devices.threads
        (memory, _), session = devices.told[1], kit.node.sessions.all()[0]
        assert session.regions[reply.region_id].memory is memory and not devices.gone
        await engine.ask("UnregisterRegion", engine_pb2.UnregisterRegionRequest(region_id=reply.region_id))
        assert devices.gone == [memory]


async def test_a_region_that_devices_refuse_is_refused_and_may_come_again(tmp_path: Path) -> None:
    devices = Devices()
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        kit.node._adopt_region = devices.adopt
        devices.refusal = BadRegion("the region is not taken by the CNICs: RLIMIT_MEMLOCK is 8388608")
        call = await region(engine)
        refusal = await refused(call)
        assert (refusal.code, refusal.reason) == (StatusCode.INVALID_ARGUMENT, "BAD_REGION")
        assert "RLIMIT_MEMLOCK" in refusal.message
        assert (await kit.status()).regions == 1
        devices.refusal = None
        assert (await (await region(engine))).region_id and (await kit.status()).regions == 2


async def test_bad_hints_take_nothing(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        assert (await refused(await region(engine, gpu_pci_address="x" * 300))).reason == "BAD_REGION"
        assert (await refused(await region(engine, numa_node=1 << 31))).reason == "BAD_REGION"


async def test_while_devices_take_a_region_others_are_served(tmp_path: Path) -> None:
    devices = Devices()
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        kit.node._adopt_region = devices.adopt
        devices.gate.clear()
        registering = asyncio.ensure_future(await region(engine))
        assert (await kit.status()).regions == 1
        await engine.store(2)
        assert not registering.done()
        devices.gate.set()
        assert (await registering).region_id


async def test_devices_that_take_too_long_are_not_waited_for_and_the_next_try_finds_it_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "ADOPT_S", 0.05)
    devices = Devices()
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        kit.node._adopt_region = devices.adopt
        devices.gate.clear()
        refusal = await refused(await region(engine))
        assert refusal.reason == "QUEUE_FULL" and refusal.retryable and "did not end within" in refusal.message
        devices.gate.set()
        assert (await kit.status()).regions == 1


async def test_an_engine_that_dies_while_its_region_is_taken_leaves_nothing(tmp_path: Path) -> None:
    devices = Devices()
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        kit.node._adopt_region = devices.adopt
        devices.gate.clear()
        call = await region(engine)
        await asyncio.sleep(0.05)
        engine.companion.close()
        await kit.until_live(lambda: not len(kit.node.sessions))
        devices.gate.set()
        assert (await refused(call)).reason in ("UNKNOWN_REGION", "UNKNOWN_SESSION")

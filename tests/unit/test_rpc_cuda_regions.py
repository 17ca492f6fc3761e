"""Regions in GPU memory over the engine's API: what is refused, with which reason, and that nothing of it is left."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from rpc_kit import LAYERS, SEGMENTS, TOKENS, Case, check_refusals, rpc_kit

from kvmover_client import wire
from kvmover_client.memory import paged_geometry
from kvmover_client.words import Layout
from kvmover_proto import engine_pb2
from kvmoverd import devices
from kvmoverd.adapters.memory.cuda import Gpus
from kvmoverd.adapters.memory.cuda_library import CudaLibrary
from kvmoverd.core.errors import NoCuda

GEOMETRY = paged_geometry(Layout(TOKENS, (SEGMENTS,) * LAYERS), 8)
PCI = "0000:3b:00.0"


def no_cuda() -> CudaLibrary:
    raise NoCuda("no NVIDIA driver can be used here: there is none")


def cuda(**fields: Any) -> engine_pb2.CudaMemory:
    usual = {"ipc_handle": b"h" * 64, "offset_bytes": 0, "size_bytes": GEOMETRY.size_bytes, "pci_address": PCI}
    return engine_pb2.CudaMemory(**(usual | fields))


async def test_a_daemon_without_cuda_refuses_gpu_memory_and_bounds_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "Gpus", partial(Gpus, load=no_cuda))
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()

        def register(memory: engine_pb2.CudaMemory, **fields: Any) -> Any:
            request = engine_pb2.RegisterRegionRequest(
                fingerprint=engine.fingerprint, layers=wire.region_layers(GEOMETRY), cuda=memory, **fields
            )
            return engine.ask("RegisterRegion", request)

        bad = (StatusCode.INVALID_ARGUMENT, "BAD_REGION")
        cases: list[Case] = [
            ("a ticket beside it", lambda: register(cuda(), fd_ticket=7), *bad),
            ("a short handle", lambda: register(cuda(ipc_handle=b"h" * 63)), *bad),
            ("a long handle", lambda: register(cuda(ipc_handle=b"h" * 65)), *bad),
            ("no bytes", lambda: register(cuda(size_bytes=0)), *bad),
            ("fewer than none", lambda: register(cuda(size_bytes=-1)), *bad),
            ("before the allocation", lambda: register(cuda(offset_bytes=-1)), *bad),
            ("no GPU's address", lambda: register(cuda(pci_address="cuda:0")), *bad),
            ("no address", lambda: register(cuda(pci_address="")), *bad),
            ("no CUDA", lambda: register(cuda()), StatusCode.FAILED_PRECONDITION, "NO_CUDA"),
        ]
        await check_refusals(kit, cases)
        assert [(session.mappings, len(session.regions)) for session in kit.node.sessions.all()] == [({}, 1)]

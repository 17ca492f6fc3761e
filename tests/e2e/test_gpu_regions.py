"""Engines whose pages lie on a GPU, with real daemons and a library of CUDA's calls instead of a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, running
from engine import END_S, LAYERS, LAYOUT, MANIFEST, SCRUB, Engine, kv

from kvmover_client import ROOT, AsyncClient, BadPlan, BadRegion, BlockState, CudaMemory, NoCuda, Plan, paged_geometry
from kvmover_client import Path as ReadPath
from kvmover_client import cuda as client_cuda
from tests.contract.cuda_kit import PCI, Shim, compile_shim

pytestmark = pytest.mark.e2e

PAGES = 8
GEOMETRY = paged_geometry(LAYOUT, PAGES)
BEFORE_BYTES = 4096
"""The region lies in the middle of an allocation, as a tensor of a caching allocator does."""


class GpuEngine:
    """A session whose pages are on a GPU; their bytes are seen through the library's files."""

    def __init__(self, client: AsyncClient, shim: Shim) -> None:
        self.client, self._shim = client, shim
        self._pointer = ctypes.c_void_p()
        size_bytes = ctypes.c_size_t(BEFORE_BYTES + GEOMETRY.size_bytes)
        assert shim.calls.cudaMalloc(ctypes.byref(self._pointer), size_bytes) == 0
        assert self._pointer.value is not None
        self.memory = CudaMemory.of_pointer(self._pointer.value + BEFORE_BYTES, GEOMETRY.size_bytes)
        self.bytes = shim.bytes_of(self.memory.ipc_handle)[BEFORE_BYTES:]

    async def register(self) -> None:
        self.model = await self.client.register_model(MANIFEST)
        self.region = await self.client.register_cuda_region(self.memory, GEOMETRY, self.model)

    def page(self, layer: int, page: int) -> np.ndarray:
        return self.bytes[GEOMETRY.page_span(layer, 0, page)]

    def wrong(self, keys: list[bytes], first_page: int = 0) -> list[tuple[int, int]]:
        blocks = enumerate(keys)
        return [
            (block, layer)
            for block, key in blocks
            for layer in range(LAYERS)
            if not np.array_equal(self.page(layer, first_page + block), kv(key, layer))
        ]

    def fill(self, keys: list[bytes], first_page: int = 0) -> None:
        for page, key in enumerate(keys, first_page):
            for layer in range(LAYERS):
                self.page(layer, page)[:] = kv(key, layer)

    async def store(self, request_id: str, keys: list[bytes]) -> None:
        self.fill(keys)
        pages = range(len(keys))
        call = await self.client.store_blocks(request_id, 1, self.model, keys, ROOT, 0, self.region, pages)
        assert [block.state for block in await call.result()] == [BlockState.HIT] * len(keys)
        await call.end()
        self.bytes[:] = SCRUB

    keys = Engine.keys


@pytest.fixture
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shim:
    file = compile_shim(tmp_path)
    (tmp_path / "gpu").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(file.parent))
    monkeypatch.setenv("CUDA_SHIM_DIR", str(tmp_path / "gpu"))
    monkeypatch.setattr(client_cuda, "DRIVER", str(file))
    shim = Shim(file, 13_000, tmp_path / "gpu")
    shim.reset()
    return shim


@contextlib.asynccontextmanager
async def gpu_engine(endpoint: str, shim: Shim) -> AsyncIterator[GpuEngine]:
    engine = GpuEngine(await AsyncClient.connect(endpoint, name="gpu", timeout_s=10.0), shim)
    await engine.register()
    yield engine
    await engine.client.close()


async def test_blocks_go_from_a_gpu_to_the_store_and_back_and_layers_arrive_as_they_come(shim: Shim) -> None:
    with running(nodes=1) as cluster:
        async with gpu_engine(cluster.pe.endpoint, shim) as engine:
            keys = engine.keys("prompt", 4)
            await engine.store("store", keys)
            call = await engine.client.fetch_blocks(
                "fetch", 1, engine.model, keys, region=engine.region, pages=range(4, 8)
            )
            assert [block.state for block in (await call.result()).blocks] == [BlockState.HIT] * 4
            await call.end()
            assert engine.wrong(keys, 4) == []
            assert (engine.bytes[GEOMETRY.page_span(0, 0, 0)] == SCRUB).all()
            stream = await engine.client.stream_layers(_plan(engine, keys))
            for layer in range(LAYERS):
                await stream.wait_layer(layer)
                assert all(np.array_equal(engine.page(layer, block), kv(key, layer)) for block, key in enumerate(keys))
            stream.cancel()
            await stream.end(END_S)
            status = await cluster.pe.status()
            assert "CUDA 13.0, cudaMemcpyBatchAsync, 64 of 64 MiB of the pool pinned" in status["local_copies"]
            assert await engine.client.unregister_region(engine.region)
        await cluster.pe.slots_home()


async def test_an_engine_that_dies_leaves_its_gpu_memory_to_the_daemon_until_it_is_closed(shim: Shim) -> None:
    with running(nodes=1) as cluster:
        async with gpu_engine(cluster.pe.endpoint, shim) as engine:
            handle = engine.memory.ipc_handle
            assert _maps(cluster, handle)
        await cluster.pe.settled(lambda status: status["sessions"] == 0, "rid of the session")
        await _until(lambda: not _maps(cluster, handle))


async def test_a_daemon_refuses_what_it_can_not_open_and_goes_on(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(nodes=1) as cluster:
        async with gpu_engine(cluster.pe.endpoint, shim) as engine:
            good = engine.memory
            for memory, words in (
                (CudaMemory(b"?" * 64, 0, GEOMETRY.size_bytes, PCI[0]), "can't be opened"),
                (CudaMemory(good.ipc_handle, 1 << 40, good.size_bytes, PCI[0]), "the allocation has"),
                (CudaMemory(good.ipc_handle, 0, 4096, PCI[0]), "4096"),
                (CudaMemory(good.ipc_handle[:10], 0, 4096, PCI[0]), "10 bytes, must have 64"),
            ):
                with pytest.raises(BadRegion, match=words):
                    await engine.client.register_cuda_region(memory, GEOMETRY, engine.model)
            elsewhere = CudaMemory(good.ipc_handle, 0, good.size_bytes, "0000:99:00.0")
            with pytest.raises(NoCuda, match=r"sees no GPU at 0000:99:00\.0"):
                await engine.client.register_cuda_region(elsewhere, GEOMETRY, engine.model)
            assert (await cluster.pe.status())["regions"] == 1
        monkeypatch.delenv("LD_LIBRARY_PATH")
        cluster.pe.terminate()
        cluster.pe.start()
        client = await AsyncClient.connect(cluster.pe.endpoint, timeout_s=10.0)
        model = await client.register_model(MANIFEST)
        with pytest.raises(NoCuda, match="no NVIDIA driver can be used here") as caught:
            await client.register_cuda_region(engine.memory, GEOMETRY, model)
        assert "register host memory" in caught.value.remedy
        await client.close()


async def test_pages_on_a_gpu_that_the_transport_between_nodes_does_not_reach_are_refused(shim: Shim) -> None:
    with running(nodes=2) as cluster:
        async with gpu_engine(cluster.pe.endpoint, shim) as engine:
            plan = _plan(engine, engine.keys("prompt", 2), decode_node="de")
            for begin in (engine.client.stream_layers, engine.client.push_layers):
                call = await begin(plan)
                with pytest.raises(BadPlan, match=r"is memory of GPU 0, and only transport\.kind = verbs moves"):
                    await call.end(END_S)


def _plan(engine: GpuEngine, keys: list[bytes], decode_node: str = "pe") -> Plan:
    return Plan(
        request_id="stream",
        attempt=1,
        fingerprint=engine.model.fingerprint,
        block_keys=keys,
        tail_tokens=0,
        hit_blocks=len(keys),
        decode_node=decode_node,
        path=ReadPath.PE,
        region_id=engine.region.region_id,
        page_sets=[range(len(keys))],
        timeout_s=20.0,
    )


def _maps(cluster: Cluster, handle: bytes) -> bool:
    """Has the daemon the allocation open?"""
    pid, number = np.frombuffer(handle[8:24], np.int64).tolist()
    return f"gpu-{pid}-{number}" in Path(f"/proc/{cluster.pe.pid}/maps").read_text()


async def _until(done: Callable[[], bool]) -> None:
    for _ in range(500):
        if done():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 5 s")

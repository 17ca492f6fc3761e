"""GPU memory over a library of CUDA's calls: what is opened and refused, how it is copied, what a sick GPU may not do."""

from __future__ import annotations

import os

import numpy as np
import pytest
from cuda_kit import PCI, WITHOUT_BATCH, Shim, gpu_share
from cuda_region_kit import MIB, PIECE_BYTES, REGION_BYTES, Opened, every_runtime, host_view, move, slices, wait_for

from kvmoverd.adapters.memory import iovec
from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.memory.cuda import Gpus
from kvmoverd.adapters.memory.cuda_library import CudaError
from kvmoverd.core.errors import BadRegion, KvmoverError, NoCuda
from kvmoverd.ports.memory import GpuRegion, GpuShare, LentMemory


def test_a_region_has_addresses_that_no_processor_touches_and_says_its_gpu(gpus: Gpus, shim: Shim) -> None:
    opened = Opened(gpus, shim, gpu=1, offset_bytes=4096 + 512)
    region = opened.region
    assert isinstance(region, GpuRegion) and isinstance(region, LentMemory)
    assert (region.page_kind, region.pci_address, region.size_bytes) == ("GPU 1", PCI[1], REGION_BYTES)
    with pytest.raises(OSError, match="Bad address"):
        iovec.copy(slices((region.address, 8)), slices((region.address + 8, 8)))
    region.close()


def test_a_region_is_shared_by_dmabuf_in_whole_pages_with_the_place_it_begins_at(gpus: Gpus, shim: Shim) -> None:
    region = Opened(gpus, shim, size_bytes=10_000, offset_bytes=4096 + 512).region
    assert region.dmabuf_fd >= 0 and region.dmabuf_refusal == ""
    assert region.dmabuf_offset_bytes == 512
    assert (shim.count("dmabuf_start"), shim.count("dmabuf_bytes")) == (4096, 12_288)
    fd = region.dmabuf_fd
    seen: list[int] = []
    region.on_close(lambda: seen.append(region.dmabuf_fd))
    region.close()
    assert seen == [fd], "who registered it lets go while it is open"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_driver_without_dmabuf_leaves_a_region_that_says_why(gpus: Gpus, shim: Shim) -> None:
    shim.do(no_dmabuf=1)
    region = Opened(gpus, shim).region
    assert region.dmabuf_fd == -1 and "no memory by dmabuf" in region.dmabuf_refusal
    region.close()


def test_a_gpu_that_may_run_ahead_of_what_rdma_wrote_is_not_shared(gpus: Gpus, shim: Shim) -> None:
    shim.do(unordered=1)
    region = Opened(gpus, shim).region
    assert region.dmabuf_fd == -1 and "may start before what RDMA wrote is there" in region.dmabuf_refusal
    region.close()


@every_runtime
def test_bytes_go_from_the_pool_to_a_gpu_and_back_with_any_cuts(gpus: Gpus, shim: Shim, arena: Arena) -> None:
    opened, rng = Opened(gpus, shim), np.random.default_rng(5)
    base, there = arena.address, opened.region.address
    host = host_view(arena, 4 * PIECE_BYTES)
    host[:] = rng.integers(0, 256, len(host), np.uint8)
    source = slices(*((base + i * 65_536, 42_000) for i in range(20)))
    target = slices(*((there + i * 21_504, 21_000) for i in reversed(range(40))))
    assert move(gpus, target, source) == 840_000
    sent = np.concatenate([host[i * 65_536 : i * 65_536 + 42_000] for i in range(20)])
    on_gpu = np.concatenate([opened.bytes[i * 21_504 : i * 21_504 + 21_000] for i in reversed(range(40))])
    assert (sent == on_gpu).all()
    back = slices((base + 2 * PIECE_BYTES, 840_000))
    move(gpus, back, target)
    assert (host[2 * PIECE_BYTES : 2 * PIECE_BYTES + 840_000] == sent).all()
    batches, each = shim.count("batches"), shim.count("each")
    assert (batches, each) == ((0, 80) if shim.version == WITHOUT_BATCH else (2, 0)), "one submission a step"
    opened.region.close()


def test_bytes_go_from_one_gpu_to_another(gpus: Gpus, shim: Shim) -> None:
    first, second = Opened(gpus, shim, gpu=0), Opened(gpus, shim, gpu=1)
    first.bytes[:5000] = 7
    move(gpus, slices((second.region.address + 100, 5000)), slices((first.region.address, 5000)))
    assert (second.bytes[100:5100] == 7).all() and not second.bytes[:100].any() and not second.bytes[5100:].any()
    first.region.close()
    second.region.close()


def test_a_layer_of_many_small_slices_is_one_submission(gpus: Gpus, shim: Shim, arena: Arena) -> None:
    opened = Opened(gpus, shim)
    rows = np.arange(4000, dtype=np.uint64) * np.uint64(512)
    source = np.stack([rows + np.uint64(arena.address), np.full(4000, 256, np.uint64)], axis=1)
    target = np.stack([rows + np.uint64(opened.region.address), np.full(4000, 256, np.uint64)], axis=1)
    move(gpus, target, source)
    assert (shim.count("batches"), shim.count("copies")) == (1, 4000)
    opened.region.close()


def test_the_step_of_host_memory_is_none_of_cudas(gpus: Gpus, shim: Shim, arena: Arena) -> None:
    host = slices((arena.address, 100))
    assert gpus.step(host, host) is None
    region = Opened(gpus, shim).region
    inside, last = slices((region.address + 5, 10)), slices((region.address + region.size_bytes - 1, 1))
    assert gpus.step(host, inside) and gpus.step(inside, host) and gpus.step(last, host)
    assert gpus.step(host, slices((region.address + region.size_bytes, 8))) is None
    region.close()
    assert gpus.step(host, inside) is None


def test_the_pool_is_pinned_once_in_pieces_and_unpinned_at_the_end(shim: Shim, arena: Arena) -> None:
    gpus = Gpus(arena, piece_bytes=PIECE_BYTES, load=shim.library)
    assert (gpus.text, shim.count("pins")) == ("", 0), "nothing before a region comes"
    regions = [Opened(gpus, shim).region for _ in range(3)]
    wait_for(lambda: "16 of 16 MiB" in gpus.text)
    assert gpus.text == "CUDA 13.0, cudaMemcpyBatchAsync, 16 of 16 MiB of the pool pinned"
    assert shim.count("pinned") == shim.count("pins") == 1
    move(gpus, slices((regions[0].address, 100)), slices((arena.address, 100)))
    assert shim.count("pageable") == 0
    for region in regions:
        region.close()
    assert gpus.close() and shim.count("pinned") == 0


def test_pieces_end_where_no_slot_does(shim: Shim, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmoverd.adapters.memory.cuda_pins.PIECE_BYTES", PIECE_BYTES + MIB)
    gpus = Gpus(arena, piece_bytes=PIECE_BYTES, load=shim.library)
    region = Opened(gpus, shim).region
    wait_for(lambda: shim.count("pinned") == 4)
    at = arena.address + PIECE_BYTES
    with pytest.raises(CudaError, match="invalid argument"):
        move(gpus, slices((region.address, 200)), slices((at - 100, 200)))
    assert shim.count("straddles") == 1, "the library is as strict as CUDA"
    shim.forget("straddles")
    region.close()
    assert gpus.close()


def test_a_pool_that_can_not_be_pinned_is_copied_all_the_same_and_status_says_so(
    shim: Shim, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmoverd.adapters.memory.cuda_pins.PIECE_BYTES", PIECE_BYTES)
    shim.do(pin_error_at=3)
    gpus = Gpus(arena, piece_bytes=PIECE_BYTES, load=shim.library)
    opened = Opened(gpus, shim)
    wait_for(lambda: "cudaHostRegister" in gpus.text)
    assert "8 of 16 MiB of the pool pinned: cudaHostRegister: error 2" in gpus.text
    host_view(arena, 16 * MIB)[12 * MIB : 12 * MIB + 9] = 9
    move(gpus, slices((opened.region.address, 9)), slices((arena.address + 12 * MIB, 9)))
    assert (opened.bytes[:9] == 9).all() and shim.count("pageable") == 1
    opened.region.close()
    assert gpus.close()


@pytest.mark.parametrize(
    ("share", "error", "words"),
    [
        (gpu_share(b"x" * 63, 10), BadRegion, "63 bytes, must have 64"),
        (gpu_share(b"x" * 64, 0), BadRegion, "a region of 0 bytes"),
        (gpu_share(b"x" * 64, 1, -1), BadRegion, "offset -1"),
        (gpu_share(b"x" * 64, 1 << 20), BadRegion, "can't be opened: cudaIpcOpenMemHandle: error 1: invalid argument"),
        (GpuShare(b"x" * 64, 0, 1, "gpu0"), BadRegion, "pci_address is 'gpu0', must be as"),
        (GpuShare(b"x" * 64, 0, 1, "0000:99:00.0"), NoCuda, "sees no GPU at 0000:99:00.0, but 0000:3b:00.0, 0000:5e"),
    ],
)
def test_what_is_no_gpu_memory_is_refused_with_the_reason(
    gpus: Gpus, share: GpuShare, error: type[KvmoverError], words: str
) -> None:
    with pytest.raises(error, match=words):
        gpus.open(share)


def test_a_region_must_lie_within_its_allocation_and_on_its_gpu_and_nothing_stays_open(gpus: Gpus, shim: Shim) -> None:
    handle = shim.share(10_000)
    with pytest.raises(BadRegion, match="takes 9001 bytes from offset 1000 on, the allocation has 10000"):
        gpus.open(gpu_share(handle, 9_001, 1_000))
    with pytest.raises(BadRegion, match="takes 1 bytes from offset 9223372036854775807 on"):
        gpus.open(gpu_share(handle, 1, (1 << 63) - 1))
    with pytest.raises(BadRegion, match=r"memory of 0000:3b:00\.0, pci_address says 0000:5e:00.0"):
        gpus.open(gpu_share(handle, 9_000, 0, gpu=1))
    assert shim.count("opened") == 0
    region = gpus.open(gpu_share(handle, 9_000, 1_000))
    assert region.size_bytes == 9_000
    region.close()


def test_one_allocation_may_be_several_regions_and_each_is_closed_for_itself(gpus: Gpus, shim: Shim) -> None:
    handle = shim.share(8192)
    low, high = gpus.open(gpu_share(handle, 4096)), gpus.open(gpu_share(handle, 4096, 4096))
    again = gpus.open(gpu_share(handle, 4096))
    assert high.address == low.address + 4096 == again.address + 4096
    low.close()
    low.close()
    wait_for(lambda: low.given_back)
    assert gpus.step(slices((again.address, 1)), slices((1, 1))) is not None
    assert (high.given_back, shim.count("opened")) == (False, 2)
    again.close()
    high.close()
    wait_for(lambda: high.given_back and again.given_back)

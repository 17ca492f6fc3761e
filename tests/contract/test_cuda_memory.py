"""GPU memory over a library of CUDA's calls: what is opened and refused, how it is copied, what a sick GPU may not do."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from cuda_kit import NEWEST, PCI, WITH_FAILED, WITHOUT_BATCH, Shim, compile_shim, gpu_share
from gpu_child import sharing
from markers import needs_gpu

from kvmoverd.adapters.memory import cuda_library, iovec
from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.memory.cuda import Gpus
from kvmoverd.adapters.memory.cuda_copy import GpuCopies, GpuLost
from kvmoverd.adapters.memory.cuda_library import CudaError, load_cuda
from kvmoverd.adapters.memory.iovec import Cursor
from kvmoverd.adapters.memory.region import Regions
from kvmoverd.adapters.transport.shm import ShmTransport
from kvmoverd.core.errors import BadRegion, KvmoverError, NoCuda
from kvmoverd.core.status import Reason
from kvmoverd.ports.memory import GpuRegion, GpuShare, LentMemory
from kvmoverd.ports.transport import IoVec, Received, Send, Sent, Sink, SinkQuiet, TransportEvent

MIB = 1 << 20
PIECE_BYTES = 4 * MIB
REGION_BYTES = 2 * MIB


@pytest.fixture(scope="module")
def shim_files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    home, made = tmp_path_factory.mktemp("shim"), dict[int, Path]()

    def file(version: int) -> Path:
        if version not in made:
            made[version] = compile_shim(home, version)
        return made[version]

    return file


@pytest.fixture(params=[NEWEST])
def shim(
    request: pytest.FixtureRequest,
    shim_files: Callable[[int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Shim]:
    monkeypatch.setenv("CUDA_SHIM_DIR", str(tmp_path))
    shim = Shim(shim_files(request.param), request.param, tmp_path)
    shim.reset()
    yield shim
    shim.do(hang=0, close_hang=0, broken=0)
    wait_for(lambda: shim.count("opened") == 0)
    assert {name: shim.count(name) for name in ("pinned", "straddles", "streams", "events")} == {
        "pinned": 0,
        "straddles": 0,
        "streams": 0,
        "events": 0,
    }


every_runtime = pytest.mark.parametrize("shim", [NEWEST, WITH_FAILED, WITHOUT_BATCH], indirect=True)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(4 * PIECE_BYTES, PIECE_BYTES)
    arena.touch()
    yield arena
    arena.close()


@pytest.fixture
def gpus(shim: Shim, arena: Arena) -> Iterator[Gpus]:
    gpus = Gpus(arena, piece_bytes=PIECE_BYTES, load=shim.library)
    yield gpus
    shim.do(hang=0, broken=0)
    assert gpus.close(5.0)


class Opened:
    """A region and the bytes behind it."""

    def __init__(self, gpus: Gpus, shim: Shim, size_bytes: int = REGION_BYTES, offset_bytes: int = 0, gpu: int = 0):
        self.handle = shim.share(offset_bytes + size_bytes, gpu)
        self.region = gpus.open(gpu_share(self.handle, size_bytes, offset_bytes, gpu))
        self.bytes = shim.bytes_of(self.handle)[offset_bytes:]


def wait_for(done: Callable[[], bool], timeout_s: float = 5.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.001)


def slices(*rows: tuple[int, int]) -> IoVec:
    return np.array(rows, dtype=np.uint64)


def host_view(arena: Arena, size_bytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(arena.address))


def move(gpus: Gpus, destination: IoVec, source: IoVec) -> int:
    step = gpus.step(destination, source)
    assert step is not None
    return iovec.copy(destination, source, step)


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


def test_memory_is_given_back_only_when_the_driver_says_so_and_the_caller_does_not_wait(gpus: Gpus, shim: Shim) -> None:
    region = Opened(gpus, shim).region
    shim.do(close_hang=1)
    began_s = time.monotonic()
    region.close()
    assert time.monotonic() - began_s < 1.0 and not region.given_back
    shim.do(close_hang=0)
    wait_for(lambda: region.given_back)


@every_runtime
def test_a_copy_that_fails_leaves_nothing_under_way(gpus: Gpus, shim: Shim, arena: Arena) -> None:
    opened = Opened(gpus, shim)
    host_view(arena, 4 * 1000)[:] = 5
    source = slices(*((arena.address + i * 1000, 500) for i in range(4)))
    target = slices(*((opened.region.address + i * 1000, 500) for i in range(4)))
    shim.do(batch_error_at=3, each_error_at=3, delay_us=3000)
    where = " at copy 2 of 4" if shim.version == WITH_FAILED else ""
    with pytest.raises(CudaError, match=f"cudaMemcpy(Batch)?Async{where}: error 1: invalid argument"):
        move(gpus, target, source)
    first = opened.bytes.copy()
    assert (first[1000:1500] == 5).all() and not first[2000:].any()
    shim.do(batch_error_at=0, each_error_at=0, delay_us=0)
    move(gpus, target, source)
    assert (opened.bytes[3000:3500] == 5).all(), "the GPU is well"
    opened.region.close()


def test_a_forgotten_sink_is_left_between_two_steps(gpus: Gpus, shim: Shim, arena: Arena) -> None:
    opened = Opened(gpus, shim)
    to, source = slices((opened.region.address, 100)), slices((arena.address, 100))
    step = gpus.step(to, source)
    assert step is not None and step(Cursor(to), Cursor(source), bytearray(b"\1")) == 0
    assert shim.count("copies") == 0
    opened.region.close()


def test_a_stuck_gpu_gets_nothing_more_and_its_copy_returns_only_when_it_is_over(shim: Shim, arena: Arena) -> None:
    library = shim.library()
    copies, handle = GpuCopies(library, stuck_s=0.05), shim.share(4096)
    base = library.open_handle(handle)
    to, source = slices((base, 100)), slices((arena.address, 100))
    host_view(arena, 100)[:] = 3
    shim.do(hang=1)
    moved: list[int] = []
    thread = threading.Thread(target=lambda: moved.append(iovec.copy(to, source, lambda *a: copies.copy(0, *a))))
    thread.start()
    wait_for(lambda: bool(copies.lost(0)))
    with pytest.raises(GpuLost, match="GPU 0 has not ended a copy for 0 s"):
        copies.copy(0, Cursor(to), Cursor(source))
    assert moved == [] and copies.lost(1) == ""
    shim.do(hang=0)
    thread.join(5.0)
    assert (moved, copies.lost(0)) == ([100], "")
    assert copies.copy(0, Cursor(to), Cursor(source)) == 100
    assert (shim.bytes_of(handle)[:100] == 3).all()
    library.close_handle(base)
    copies.close()


@pytest.mark.parametrize("when", ["recorded", "asked"])
def test_an_error_that_ruins_nothing_ends_no_copy_that_may_still_run(when: str, shim: Shim, arena: Arena) -> None:
    library = shim.library()
    copies, handle = GpuCopies(library), shim.share(4096)
    base = library.open_handle(handle)
    to, source = slices((base, 100)), slices((arena.address, 100))
    host_view(arena, 100)[:] = 3
    shim.do(hang=1, event_error=2 if when == "recorded" else 0)
    ends: list[object] = []

    def work() -> None:
        try:
            ends.append(copies.copy(0, Cursor(to), Cursor(source)))
        except CudaError as error:
            ends.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(lambda: shim.count("copies") == 1)
    shim.do(event_error=2)
    wait_for(lambda: bool(copies.lost(0)))
    assert "GPU 0 does not say whether its copies have ended: cudaEvent" in copies.lost(0)
    with pytest.raises(GpuLost, match="does not say whether"):
        copies.copy(0, Cursor(to), Cursor(source))
    shim.do(event_error=0)
    time.sleep(0.02)
    assert thread.is_alive() and not ends, "the copy may still run"
    shim.do(hang=0)
    thread.join(5.0)
    assert isinstance(ends[0], CudaError) and ends[0].code == 2, "nobody knows whether all of it was copied"
    assert copies.lost(0) == ""
    assert copies.copy(0, Cursor(to), Cursor(source)) == 100
    library.close_handle(base)
    copies.close()


def test_a_gpu_that_breaks_ends_its_copy_and_is_not_used_again(gpus: Gpus, shim: Shim, arena: Arena) -> None:
    region = Opened(gpus, shim).region
    to, source = slices((region.address, 100)), slices((arena.address, 100))
    shim.do(hang=1)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            move(gpus, to, source)
        except CudaError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(lambda: shim.count("copies") == 1)
    shim.do(broken=719)
    thread.join(5.0)
    assert len(failed) == 1 and str(failed[0]).endswith("error 719: unspecified launch failure")
    with pytest.raises(GpuLost, match=r"can't be used by this process any more, restart it: cudaEvent\w+: error 719"):
        move(gpus, to, source)
    wait_for(lambda: shim.count("dropped") == 1)
    shim.do(hang=0, broken=0)
    region.close()


def test_without_a_driver_or_a_gpu_or_the_functions_the_reason_is_told(
    shim: Shim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoCuda, match=r"no NVIDIA driver can be used here: libnone.so.1: cannot open"):
        load_cuda(lambda: iter([shim.path]), "libnone.so.1")
    with pytest.raises(
        NoCuda, match=r"libc.so.6 is another version: .*cudaRuntimeGetVersion; libnot.so.5: cannot open"
    ):
        load_cuda(lambda: iter(["libc.so.6", "libnot.so.5"]), shim.path)
    shim.do(gpus=0)
    with pytest.raises(NoCuda, match="cudaGetDeviceCount: error 100"):
        load_cuda(lambda: iter([shim.path]), shim.path)
    with pytest.raises(NoCuda) as caught:
        Gpus(load=lambda: load_cuda(lambda: iter([shim.path]), shim.path)).open(gpu_share(b"x" * 64, 1))
    assert "--gpus" in caught.value.remedy
    with pytest.raises(NoCuda, match="built without GPUs"):
        Regions().open_gpu(gpu_share(b"x" * 64, 1))
    monkeypatch.setattr(cuda_library, "RUNTIME_PLACES", (f"{tmp_path}/cuda*/lib64",))
    (tmp_path / "cuda-13.0" / "lib64").mkdir(parents=True)
    (tmp_path / "cuda-13.0" / "lib64" / "libcudart.so.13").touch()
    assert str(tmp_path / "cuda-13.0" / "lib64" / "libcudart.so.13") in list(cuda_library.runtime_candidates())


def test_an_old_driver_under_a_new_runtime_gets_no_batches(shim: Shim) -> None:
    shim.do(driver=12_040)
    assert not shim.library().has_batch


def test_copies_of_several_threads_have_streams_of_their_own(gpus: Gpus, shim: Shim, arena: Arena) -> None:
    opened = Opened(gpus, shim)
    host = host_view(arena, 64_000)
    host[:] = np.arange(64_000) % 251

    def work(number: int) -> None:
        for row in range(8):
            at = (number * 8 + row) * 1000
            move(gpus, slices((opened.region.address + at, 1000)), slices((arena.address + at, 1000)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert (opened.bytes[:64_000] == host).all()
    assert shim.count("streams") == 8
    opened.region.close()


def test_a_sink_on_a_gpu_is_not_quiet_while_a_copy_hangs_and_a_stop_says_so(
    gpus: Gpus, shim: Shim, arena: Arena
) -> None:
    opened = Opened(gpus, shim)
    target = slices((opened.region.address, 100))
    transport = ShmTransport("a", "boot", None, check_key=lambda key: None, arena=arena, regions=Regions(gpus))
    shim.do(hang=1)
    transport.expect(Sink(1, lambda layer, first_block: target))
    transport.submit([Send(7, None, 1, 0, 0, slices((arena.address, 100)))])
    wait_for(lambda: shim.count("copies") == 1)
    transport.forget(1)
    time.sleep(0.05)
    assert transport.poll(10) == [] and "CUDA 13.0" in transport.copy_text
    shim.do(hang=0)
    events: list[TransportEvent] = []
    wait_for(lambda: events.extend(transport.poll(10)) or len(events) == 2)
    assert SinkQuiet(1) in events and [e.reason for e in events if isinstance(e, Sent)] == [Reason.CANCELLED]
    shim.do(hang=1)
    transport.expect(Sink(2, lambda layer, first_block: target))
    transport.submit([Send(8, None, 2, 0, 0, slices((arena.address, 100)))])
    wait_for(lambda: shim.count("copies") == 2)
    assert not transport.close(0.1), "a thread still waits for the GPU: the pool must not be unmapped"
    shim.do(hang=0)
    wait_for(lambda: any(isinstance(event, Received) for event in transport.poll(10)))
    opened.region.close()


@needs_gpu
def test_a_real_gpu_opens_what_another_process_shares_and_copies_both_ways(arena: Arena) -> None:
    library = load_cuda()
    _check_shared(Gpus(arena, piece_bytes=PIECE_BYTES), arena, library.path, cuda_library.DRIVER)


def test_memory_that_another_process_has_allocated_is_opened_and_copied_both_ways(shim: Shim, arena: Arena) -> None:
    _check_shared(Gpus(arena, piece_bytes=PIECE_BYTES, load=shim.library), arena, shim.path, shim.path)


def _check_shared(gpus: Gpus, arena: Arena, runtime: str, driver: str) -> None:
    with sharing(runtime, driver, size_bytes=REGION_BYTES, offset_bytes=3 * 512, fill=17) as share:
        assert (share.offset_bytes, share.size_bytes) == (3 * 512, REGION_BYTES)
        region = gpus.open(share)
        host = host_view(arena, REGION_BYTES)
        move(gpus, slices((arena.address, REGION_BYTES)), slices((region.address, REGION_BYTES)))
        assert (host == 17).all()
        rows = [(arena.address + i * 43_008, 42_000) for i in range(40)]
        host[:] = np.arange(REGION_BYTES) % 251
        move(gpus, slices(*((region.address + i * 43_008, 42_000) for i in range(40))), slices(*rows))
        want = host[: 40 * 43_008].copy()
        host[:] = 0
        move(gpus, slices(*rows), slices(*((region.address + i * 43_008, 42_000) for i in range(40))))
        assert all(
            (host[i * 43_008 : i * 43_008 + 42_000] == want[i * 43_008 : i * 43_008 + 42_000]).all() for i in range(40)
        )
        region.close()
        wait_for(lambda: region.given_back)
    assert gpus.close(10.0)

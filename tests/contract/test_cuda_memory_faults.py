"""GPU memory that fails: copies that hang or break, drivers that are old or not there."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cuda_kit import WITH_FAILED, Shim, gpu_share
from cuda_region_kit import PIECE_BYTES, REGION_BYTES, Opened, every_runtime, host_view, move, slices, wait_for
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
from kvmoverd.core.errors import NoCuda
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Received, Send, Sent, Sink, SinkQuiet, TransportEvent


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

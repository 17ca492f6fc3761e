"""A layer between the pool and a GPU: RDMA writes of a CNIC to itself, one batch of CUDA's copies, a CUDA copy for each slice.

    python -m tests.bench.loopback --json

The sides run in randomly ordered rounds, each waits until its bytes are there, and what arrived is compared once. Of each
there are the whole time of a layer and the time until the call that submits it has returned, which is what a core pays. Where
there is no GPU, or no CNIC that reaches its memory, figures are null and `missing` says why.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.memory.cuda_library import CudaError, CudaLibrary, load_cuda
from kvmoverd.adapters.memory.iovec import Words
from kvmoverd.adapters.transport.verbs.device import VerbsFabric, VerbsQueuePair, open_fabric
from kvmoverd.adapters.transport.verbs.fabric import WRITE, FabricError, Writes
from kvmoverd.adapters.transport.verbs.ports import list_ports
from kvmoverd.core.errors import NoCuda, TransportRefused
from kvmoverd.core.qos import KV_LANE
from tests.bench.daemon import BenchFailed
from tests.bench.pairs import interval

SLICE_BYTES = 64 * 656
"""A Layer Block of 64 tokens."""
LAYERS = 61
"""A Full Block has so many, and a slot of the pool holds one: slices of a layer lie as far apart."""
BLOCKS = 256
ROUNDS = 21
ENDS_S = 20.0
SEED = 1
PIECE_BYTES = 4 << 20
Keys = npt.NDArray[np.uint32]
WAYS = ("to_gpu", "from_gpu")
SIDES = ("loopback", "batch", "each")


@dataclass(frozen=True, slots=True)
class Side:
    """`submit` gives a layer to the device, in one way of `WAYS`; `wait` returns when it has arrived."""

    name: str
    submit: Callable[[str], None]
    wait: Callable[[], None]


@dataclass(slots=True)
class Runs:
    """In us, a layer each."""

    whole: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)


class Layer:
    """Slices of the pool, a slot apart, and the pages of a GPU, one after the other."""

    def __init__(self, pool: int, gpu: int, blocks: int) -> None:
        rows = np.arange(blocks, dtype=np.uint64)
        self.pool = rows * np.uint64(LAYERS * SLICE_BYTES) + np.uint64(pool)
        self.gpu = rows * np.uint64(SLICE_BYTES) + np.uint64(gpu)
        self.sizes = np.full(blocks, SLICE_BYTES, np.uint64)

    def ends(self, way: str) -> tuple[Words, Words]:
        """Destination and source."""
        return (self.gpu, self.pool) if way == "to_gpu" else (self.pool, self.gpu)


def cuda_sides(library: CudaLibrary, layer: Layer) -> list[Side]:
    stream, event = library.make_stream(), library.make_event()

    def submit(copy: Callable[[Words, Words, Words, int], None], way: str) -> None:
        copy(*layer.ends(way), layer.sizes, stream)
        library.record(event, stream)

    def wait() -> None:
        _until(lambda: library.happened(event), "a layer of CUDA's copies")

    sides = [Side("each", lambda way: submit(library.copy_each, way), wait)]
    if library.has_batch:
        sides.append(Side("batch", lambda way: submit(library.copy_batch, way), wait))
    return sides


@contextmanager
def loopback_side(fabric: VerbsFabric, layer: Layer, arena: Arena, dmabuf: tuple[int, int, int]) -> Iterator[Side]:
    """`dmabuf`: the descriptor of the GPU's pages, their address and bytes. Raises `FabricError`."""
    fd, address, size_bytes = dmabuf
    with ExitStack() as opened:
        pool = fabric.register(arena.address, arena.size_bytes, piece_bytes=arena.size_bytes)
        opened.callback(pool.close)
        gpu = fabric.register(address, size_bytes, piece_bytes=size_bytes, dmabuf_fd=fd)
        opened.callback(gpu.close)
        pair = fabric.make_queue_pair(send_max=len(layer.sizes), receive_max=1)
        opened.callback(pair.destroy)
        pair.connect(pair.end, KV_LANE)
        keys = (gpu.keys(layer.gpu, layer.sizes), pool.keys(layer.pool, layer.sizes))
        chains = {way: _chain(layer, way, keys) for way in WAYS}
        yield _posting(fabric, pair, chains)


def _chain(layer: Layer, way: str, keys: tuple[Keys, Keys]) -> Writes:
    """`keys`: local and remote ones of the GPU's pages, and of the pool's slices."""
    to, source = layer.ends(way)
    to_keys, from_keys = keys if way == "to_gpu" else reversed(keys)
    found = np.zeros(len(to), WRITE)
    found["local"], found["remote"], found["size_bytes"] = source, to, layer.sizes
    found["local_key"], found["remote_key"] = from_keys[:, 0], to_keys[:, 1]
    return found


def _posting(fabric: VerbsFabric, pair: VerbsQueuePair, chains: dict[str, Writes]) -> Side:
    def wait() -> None:
        ended: list[Any] = []
        _until(lambda: bool(ended.extend(fabric.poll(1)) or ended), "a chain of writes")
        if not ended[0].ok:
            raise BenchFailed(f"a chain of writes failed: {ended[0].status}")

    return Side("loopback", lambda way: pair.post_writes(chains[way], 1, None), wait)


def measure(sides: list[Side], rounds: int) -> dict[str, dict[str, Runs]]:
    """By side and way; a first round warms up."""
    found = {side.name: {way: Runs() for way in WAYS} for side in sides}
    rng = np.random.default_rng(SEED)
    for number in range(rounds + 1):
        for at in rng.permutation(len(sides)):
            for way in WAYS:
                began_ns = time.perf_counter_ns()
                sides[at].submit(way)
                submitted_ns = time.perf_counter_ns()
                sides[at].wait()
                ended_ns = time.perf_counter_ns()
                if number:
                    runs = found[sides[at].name][way]
                    runs.whole.append((ended_ns - began_ns) / 1e3)
                    runs.submit.append((submitted_ns - began_ns) / 1e3)
    return found


def check(library: CudaLibrary, side: Side, layer: Layer, arena: Arena) -> None:
    """Bytes go to the GPU and come back the same. Raises `BenchFailed`."""
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * arena.size_bytes).from_address(arena.address))
    memory[:] = np.random.default_rng(SEED).integers(0, 256, arena.size_bytes, np.uint8)
    wanted = memory.copy()
    side.submit("to_gpu")
    side.wait()
    memory[:] = 0
    side.submit("from_gpu")
    side.wait()
    for start in (layer.pool - np.uint64(arena.address)).tolist():
        if not np.array_equal(memory[start : start + SLICE_BYTES], wanted[start : start + SLICE_BYTES]):
            raise BenchFailed(f"{side.name} on {library.pci_address(0)}: wrong bytes at {start} of the pool")


def run(library: CudaLibrary, rounds: int, blocks: int) -> tuple[dict[str, dict[str, Runs]], list[str]]:
    """Figures of all sides that can be had, and why the others can't. Raises `BenchFailed`, `CudaError`."""
    missing: list[str] = []
    library.use(0)
    with ExitStack() as opened:
        arena = Arena(-(-blocks * LAYERS * SLICE_BYTES // PIECE_BYTES) * PIECE_BYTES, PIECE_BYTES)
        opened.callback(arena.close)
        arena.touch()
        library.pin(arena.address, arena.size_bytes)
        opened.callback(library.unpin, arena.address)
        size_bytes = -(-blocks * SLICE_BYTES // PIECE_BYTES) * PIECE_BYTES
        layer = Layer(arena.address, opened.enter_context(_gpu_memory(library, size_bytes)), blocks)
        sides = cuda_sides(library, layer)
        if not library.has_batch:
            missing.append(f"cudaMemcpyBatchAsync: CUDA {library.version}, driver for {library.driver_version}")
        try:
            fabric = _fabric()
            opened.callback(fabric.close)
            address = int(layer.gpu[0])
            dmabuf = (library.export_dmabuf(0, address, size_bytes), address, size_bytes)
            sides.append(opened.enter_context(loopback_side(fabric, layer, arena, dmabuf)))
        except (TransportRefused, FabricError, BenchFailed, CudaError, OSError) as why:
            missing.append(f"loopback: {why}")
        for side in sides:
            check(library, side, layer, arena)
        return measure(sides, rounds), missing


@contextmanager
def _gpu_memory(library: CudaLibrary, size_bytes: int) -> Iterator[int]:
    """Memory of the bench's own on the GPU: the daemon allocates none, so its library has no call for it."""
    calls, pointer = ctypes.CDLL(library.path), ctypes.c_void_p()
    code = calls.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
    if code or pointer.value is None:
        raise BenchFailed(f"{size_bytes} bytes of GPU memory are not to be had: error {code}")
    try:
        yield pointer.value
    finally:
        calls.cudaFree(pointer)


def _fabric() -> VerbsFabric:
    port = next((port for port in list_ports() if port.is_active), None)
    if port is None:
        raise BenchFailed("no RDMA device with an active port")
    return open_fabric(port.device, port.port)


def _until(done: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + ENDS_S
    while not done():
        if time.monotonic() > deadline_s:
            raise BenchFailed(f"{what} did not end in {ENDS_S:g} s")


def report(found: dict[str, dict[str, Runs]], missing: list[str], blocks: int) -> dict[str, Any]:
    """Medians by side and way, with intervals, and how many times as long CUDA's ways take as the loopback."""
    figures: dict[str, Any] = {"slice_bytes": SLICE_BYTES, "blocks": blocks, "missing": missing}
    figures["machine"] = f"{platform.machine()}, Python {platform.python_version()}"
    for side in SIDES:
        for way in WAYS:
            runs = found.get(side, {}).get(way)
            median = interval(runs.whole, SEED).median if runs else None
            figures[f"{side}_{way}_us_per_layer"] = median
            figures[f"{side}_{way}_submit_us"] = interval(runs.submit, SEED).median if runs else None
            figures[f"{side}_{way}_gb_per_s"] = blocks * SLICE_BYTES / median / 1e3 if median else None
            figures[f"{side}_{way}_runs"] = runs.whole if runs else []
    for side in SIDES[1:]:
        for way in WAYS:
            figures[f"{side}_over_loopback_{way}"] = _ratio(found, side, way)
    return figures


def _ratio(found: dict[str, dict[str, Runs]], side: str, way: str) -> list[float] | None:
    """Median, and the interval of it."""
    if side not in found or "loopback" not in found:
        return None
    pairs = zip(found[side][way].whole, found["loopback"][way].whole, strict=True)
    ratio = interval([theirs / ours for theirs, ours in pairs], SEED)
    return [ratio.median, ratio.low, ratio.high]


def words(figures: dict[str, Any]) -> str:
    lines = [f"a layer of {figures['blocks']} slices of {figures['slice_bytes']} bytes"]
    for side in SIDES:
        for way in WAYS:
            whole, submit = figures[f"{side}_{way}_us_per_layer"], figures[f"{side}_{way}_submit_us"]
            text = "-" if whole is None else f"{whole:9.1f} us, {submit:8.1f} of them to submit it"
            lines.append(f"{side:9} {way:9} {text}")
    return "\n".join([*lines, *(f"not measured: {why}" for why in figures["missing"])])


def main() -> int:
    """0, also where nothing could be measured: the report says why."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.loopback", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON, all runs among them")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs of each side (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="slices of a layer (default %(default)s)")
    arguments = parser.parse_args()
    try:
        found, missing = run(load_cuda(), arguments.rounds, arguments.blocks)
    except NoCuda as why:
        found, missing = {}, [f"a GPU: {why}"]
    figures = report(found, missing, arguments.blocks)
    print(json.dumps(figures) if arguments.json else words(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())

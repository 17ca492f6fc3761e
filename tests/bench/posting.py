"""What it costs to post one slice of a chain: by the compiled helper and by its pyverbs twin, in randomly ordered rounds.

    python -m tests.bench.posting --json

Where there is an RDMA device both post for real, to a queue pair that is connected to itself. A third side posts a chain
that was built before: the driver and the doorbell alone, which is all of it on Soft-RoCE, whose doorbell is a system call
that sends the packets. What the other two cost beyond that is their own. Beside it, and alone where there is no device,
stands the null device: a driver's work, 64 bytes written for each request, with nothing behind it. There the twin builds its
work requests and does not post them.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvmoverd.adapters.transport.verbs.device import VerbsFabric, VerbsQueuePair, open_fabric
from kvmoverd.adapters.transport.verbs.fabric import WRITE, FabricError, Writes
from kvmoverd.adapters.transport.verbs.library import load
from kvmoverd.adapters.transport.verbs.ports import list_ports
from kvmoverd.adapters.transport.verbs.posting import COMPILED, MIDDLE, Chain, CompiledPosts, PyverbsPosts
from kvmoverd.core.errors import TransportRefused
from kvmoverd.core.qos import KV_LANE
from tests.bench.daemon import BenchFailed
from tests.bench.null_device import NullDevice, address_of_request
from tests.bench.pairs import Interval, interval, verdict

CHAIN = 256
"""Slices of a layer: 256 blocks of 64 tokens are a request of 16 K tokens."""
SLICE_BYTES = 64
"""Little, so that what is timed is the posting and not the moving."""
ROUNDS = 21
CHAINS = 8
"""Of each run."""
HELPER_AIM_US = 0.2
RATIO_AIM = 10.0
ENDS_S = 20.0
SEED = 1

Post = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Sides:
    """`driver` posts a chain that was built before. `drain` is called after each chain, out of the time."""

    helper: Post
    pyverbs: Post
    driver: Post
    drain: Post


@dataclass(frozen=True, slots=True)
class Table:
    """One device's figures, in us a slice; a run is the least of its chains, a figure the median of its runs."""

    device: str
    twin: str
    helper_us_per_slice: float
    pyverbs_us_per_slice: float
    driver_us_per_slice: float
    ratio: Interval
    helper: Interval
    helper_own: Interval
    pyverbs_own: Interval
    helper_aim: str
    helper_own_aim: str
    ratio_aim: str
    helper_runs: list[float]
    pyverbs_runs: list[float]
    driver_runs: list[float]


def measure(device: str, twin: str, sides: Sides, rounds: int) -> Table:
    posts = (sides.helper, sides.pyverbs, sides.driver)
    runs: tuple[list[float], ...] = ([], [], [])
    for post in posts:
        _run_us(post, sides.drain)
    rng = np.random.default_rng(SEED)
    for _ in range(rounds):
        for side in rng.permutation(len(posts)):
            runs[side].append(_run_us(posts[side], sides.drain))
    helped, plain, driven = runs
    found = [
        interval([slow / fast for fast, slow in zip(helped, plain, strict=True)], SEED),
        interval(helped, SEED),
        interval([each - alone for each, alone in zip(helped, driven, strict=True)], SEED),
        interval([each - alone for each, alone in zip(plain, driven, strict=True)], SEED),
    ]
    aims = [
        verdict(found[1], HELPER_AIM_US, runs=rounds, lower_is_better=True).value,
        verdict(found[2], HELPER_AIM_US, runs=rounds, lower_is_better=True).value,
        verdict(found[0], RATIO_AIM, runs=rounds).value,
    ]
    medians = [float(np.median(each)) for each in runs]
    return Table(device, twin, *medians, *found, *aims, *runs)


def on_null_device(null: NullDevice, rounds: int) -> Table:
    """Raises `TransportRefused` without pyverbs."""
    writes = rows(1 << 20, 1 << 30, 1, 2)
    posts, chain, built = CompiledPosts(null.pair), Chain(load()), Chain(load())
    request = address_of_request(built.build(writes, 1, 7), MIDDLE)
    sides = Sides(
        helper=lambda: posts.writes(writes, 1, 7),
        pyverbs=lambda: _only_built(chain, writes),
        driver=lambda: _posted(null.post(request)),
        drain=lambda: None,
    )
    try:
        return measure("null device", "builds its work requests and posts nothing", sides, rounds)
    finally:
        chain.close()
        built.close()


def on_device(null: NullDevice, device: str, port: int, rounds: int) -> Table:
    """Raises `FabricError`, `BenchFailed`."""
    with looped(device, port) as (fabric, pair, address, writes):
        twin, built = PyverbsPosts(fabric.library, pair.handle), Chain(fabric.library)
        request = address_of_request(built.build(writes, 1, None), MIDDLE)
        sides = Sides(
            helper=lambda: pair.post_writes(writes, 1, None),
            pyverbs=lambda: twin.writes(writes, 1, None),
            driver=lambda: _posted(null.post(request, address)),
            drain=lambda: drained(fabric),
        )
        try:
            return measure(fabric.name, "posts its work requests", sides, rounds)
        finally:
            twin.close()
            built.close()


@contextmanager
def looped(device: str, port: int) -> Iterator[tuple[VerbsFabric, VerbsQueuePair, int, Writes]]:
    """A queue pair connected to itself, the address of its struct, and writes from one half of a memory to the other."""
    fabric = open_fabric(device, port)
    size_bytes = 2 * CHAIN * SLICE_BYTES
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    address = int(memory.ctypes.data)
    registration = fabric.register(address, size_bytes, piece_bytes=size_bytes)
    pair = fabric.make_queue_pair(send_max=2 * CHAIN, receive_max=1)
    try:
        if not pair.address:
            raise BenchFailed("the struct behind a pyverbs queue pair was not found: the helper can't post")
        pair.connect(pair.end, KV_LANE)
        keys = registration.keys(np.array([address], np.uint64), np.array([size_bytes], np.uint64))[0]
        yield fabric, pair, pair.address, rows(address, address + size_bytes // 2, *keys.tolist())
    finally:
        pair.destroy()
        registration.close()
        fabric.close()


def _only_built(chain: Chain, writes: Writes) -> None:
    chain.build(writes, 1, 7)


def _posted(code: int) -> None:
    if code:
        raise BenchFailed(f"a chain that was built before was refused: {os.strerror(code)}")


def rows(local: int, remote: int, local_key: int, remote_key: int) -> Writes:
    found = np.zeros(CHAIN, WRITE)
    offsets = np.arange(CHAIN, dtype=np.uint64) * SLICE_BYTES
    found["local"], found["remote"] = local + offsets, remote + offsets
    found["size_bytes"], found["local_key"], found["remote_key"] = SLICE_BYTES, local_key, remote_key
    return found


def drained(fabric: VerbsFabric) -> None:
    """Waits for the one completion of a chain. Raises `BenchFailed`."""
    until = time.monotonic() + ENDS_S
    while not (found := fabric.poll(1)):
        if time.monotonic() > until:
            raise BenchFailed(f"a chain of {CHAIN} did not end in {ENDS_S} s")
    if not found[0].ok:
        raise BenchFailed(f"a chain failed: {found[0].status}")


def _run_us(post: Post, drain: Post) -> float:
    """Per slice, of the quickest chain: what others did to this machine meanwhile is no cost of posting."""
    best_ns = sys.maxsize
    for _ in range(CHAINS):
        began_ns = time.perf_counter_ns()
        post()
        best_ns = min(best_ns, time.perf_counter_ns() - began_ns)
        drain()
    return best_ns / CHAIN / 1e3


def tables(rounds: int) -> tuple[list[Table], list[str]]:
    """Those that can be had here, real ones first, and why others can't."""
    if not COMPILED:
        return [], ["the compiled helper is not built: it wants libibverbs-dev and a compiler"]
    found: list[Table] = []
    missing: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            null = NullDevice(Path(directory))
        except BenchFailed as why:
            return [], [str(why)]
        for measured in (_real, on_null_device):
            try:
                found.append(measured(null, rounds))
            except (TransportRefused, FabricError, BenchFailed) as why:
                missing.append(str(why))
        null.close()
    return found, missing


def _real(null: NullDevice, rounds: int) -> Table:
    port = next((port for port in list_ports() if port.is_active), None)
    if port is None:
        raise BenchFailed("no RDMA device with an active port: nothing is posted for real")
    return on_device(null, port.device, port.port, rounds)


def report(found: list[Table], missing: list[str]) -> dict[str, Any]:
    """The first table's figures on top: the real device's where there is one."""
    first = found[0] if found else None
    return {
        "helper_us_per_slice": first.helper_us_per_slice if first else None,
        "pyverbs_us_per_slice": first.pyverbs_us_per_slice if first else None,
        "ratio": first.ratio.median if first else None,
        "driver_us_per_slice": first.driver_us_per_slice if first else None,
        "measured_on": first.device if first else None,
        "chain": CHAIN,
        "slice_bytes": SLICE_BYTES,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "tables": [asdict(table) for table in found],
        "missing": missing,
    }


def words(found: list[Table], missing: list[str]) -> str:
    lines = [f"{f'us a slice, chains of {CHAIN}':28} {'helper':>8} {'pyverbs':>8} {'driver':>8} {'ratio':>22}"]
    for table in found:
        costs = (table.helper_us_per_slice, table.pyverbs_us_per_slice, table.driver_us_per_slice)
        figures = " ".join(f"{each:8.4f}" for each in costs)
        lines += [
            f"{table.device:28} {figures} {_spread(table.ratio, 1):>22}",
            f"  beyond the driver: helper {_spread(table.helper_own, 4)}, pyverbs {_spread(table.pyverbs_own, 4)}",
            f"  pyverbs {table.twin}; {HELPER_AIM_US} us: {table.helper_aim}, beyond the driver {table.helper_own_aim}; "
            f"{RATIO_AIM:.0f} times: {table.ratio_aim}",
        ]
    return "\n".join([*lines, *(f"not measured: {why}" for why in missing)])


def _spread(found: Interval, digits: int) -> str:
    return f"{found.median:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def main() -> int:
    """0 when there is a table, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.posting", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON, all runs among them")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs of each side (default %(default)s)")
    arguments = parser.parse_args()
    found, missing = tables(arguments.rounds)
    print(json.dumps(report(found, missing)) if arguments.json else words(found, missing))
    return 0 if found else 1


if __name__ == "__main__":
    raise SystemExit(main())

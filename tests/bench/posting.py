"""What it costs to post one slice of a chain: by the compiled helper, and by its pyverbs twin, in randomly ordered pairs.

    python -m tests.bench.posting --json

Where there is an RDMA device both post for real, to a queue pair of its own that is connected to itself; the cost includes
the driver's own work and the doorbell. Beside it, and alone where there is none, stands the null device: a driver's work
without a device behind it. There the twin only builds its work requests, and a call of C walks them.
"""

from __future__ import annotations

import argparse
import json
import mmap
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
from kvmoverd.adapters.transport.verbs.posting import COMPILED, Chain, CompiledPosts, Posts, PyverbsPosts
from kvmoverd.core.errors import TransportRefused
from kvmoverd.core.qos import KV_LANE
from tests.bench.daemon import BenchFailed
from tests.bench.null_device import NullDevice
from tests.bench.pairs import Interval, interval, orders, verdict

CHAIN = 256
"""Slices of a layer: 256 blocks of 64 tokens are a request of 16 K tokens."""
SLICE_BYTES = 64
"""Little, so that what is timed is the posting and not the moving."""
PAIRS = 21
CHAINS = 20
"""Of each run."""
HELPER_AIM_US = 0.2
RATIO_AIM = 10.0
ENDS_S = 20.0
SEED = 1

Post = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Table:
    """One device's figures; times are medians of the runs, each the least of its chains."""

    device: str
    twin: str
    helper_us_per_slice: float
    pyverbs_us_per_slice: float
    ratio: Interval
    helper: Interval
    helper_aim: str
    ratio_aim: str
    helper_runs: list[float]
    pyverbs_runs: list[float]


def measure(device: str, twin: str, helper: Post, pyverbs: Post, drain: Post, *, pairs: int, chain: int) -> Table:
    """`drain` is called after each chain, out of the time."""
    helped: list[float] = []
    plain: list[float] = []
    for post in (helper, pyverbs):
        _run_us(post, drain, chain)
    for helper_first in orders(pairs, SEED):
        for post, into in ((helper, helped), (pyverbs, plain))[:: 1 if helper_first else -1]:
            into.append(_run_us(post, drain, chain))
    ratio = interval([slow / fast for fast, slow in zip(helped, plain, strict=True)], SEED)
    cost = interval(helped, SEED)
    return Table(
        device,
        twin,
        cost.median,
        float(np.median(plain)),
        ratio,
        cost,
        verdict(cost, HELPER_AIM_US, runs=pairs, lower_is_better=True).value,
        verdict(ratio, RATIO_AIM, runs=pairs).value,
        helped,
        plain,
    )


def on_null_device(pairs: int) -> Table:
    """Raises `BenchFailed` without a compiler or the headers, `TransportRefused` without pyverbs."""
    library = load()
    writes = rows(1 << 20, 1 << 30, 1, 2)
    with tempfile.TemporaryDirectory() as directory:
        device = NullDevice(Path(directory))
        posts, chain = CompiledPosts(device.pair), Chain(library)
        try:
            return measure(
                "null device: 64 bytes written for each request, no doorbell",
                "builds its work requests, posts nothing",
                lambda: posts.writes(writes, 1, 7),
                lambda: built(chain, writes),
                lambda: None,
                pairs=pairs,
                chain=CHAIN,
            )
        finally:
            chain.close()
            device.close()


def built(chain: Chain, writes: Writes) -> None:
    chain.build(writes, 1, 7)


def on_device(device: str, port: int, pairs: int) -> Table:
    """Raises `FabricError`, `BenchFailed`."""
    with looped(device, port) as (fabric, pair, handle, writes):
        if not pair.is_compiled:
            raise BenchFailed("the struct behind a pyverbs queue pair was not found: the helper can't post")
        twin: Posts = PyverbsPosts(fabric.library, handle)
        try:
            return measure(
                fabric.name,
                "posts its work requests",
                lambda: pair.post_writes(writes, 1, None),
                lambda: twin.writes(writes, 1, None),
                lambda: drained(fabric),
                pairs=pairs,
                chain=CHAIN,
            )
        finally:
            twin.close()


@contextmanager
def looped(device: str, port: int) -> Iterator[tuple[VerbsFabric, VerbsQueuePair, Any, Writes]]:
    """A queue pair connected to itself, the object of pyverbs behind it, and writes from one half of a memory to the other."""
    fabric = open_fabric(device, port)
    size_bytes = 2 * CHAIN * SLICE_BYTES
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    address = int(memory.ctypes.data)
    registration = fabric.register(address, size_bytes, piece_bytes=size_bytes)
    pair = fabric.make_queue_pair(send_max=2 * CHAIN, receive_max=1)
    try:
        pair.connect(pair.end, KV_LANE)
        keys = registration.keys(np.array([address], np.uint64), np.array([size_bytes], np.uint64))[0]
        yield fabric, pair, pair.handle, rows(address, address + size_bytes // 2, *keys.tolist())
    finally:
        pair.destroy()
        registration.close()
        fabric.close()


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


def _run_us(post: Post, drain: Post, chain: int) -> float:
    """Per slice, of the quickest chain: what others did to this machine meanwhile is no cost of posting."""
    best_ns = sys.maxsize
    for _ in range(CHAINS):
        began_ns = time.perf_counter_ns()
        post()
        best_ns = min(best_ns, time.perf_counter_ns() - began_ns)
        drain()
    return best_ns / chain / 1e3


def tables(pairs: int) -> tuple[list[Table], list[str]]:
    """Those that can be had here, real ones first, and why others can't."""
    found: list[Table] = []
    missing = [] if COMPILED else ["the compiled helper is not built: libibverbs-dev and a compiler"]
    if missing:
        return found, missing
    try:
        port = next((port for port in list_ports() if port.is_active), None)
        if port is None:
            missing.append("no RDMA device with an active port: nothing is posted for real")
        else:
            found.append(on_device(port.device, port.port, pairs))
    except (TransportRefused, FabricError, BenchFailed) as why:
        missing.append(str(why))
    try:
        found.append(on_null_device(pairs))
    except (TransportRefused, BenchFailed) as why:
        missing.append(str(why))
    return found, missing


def report(found: list[Table], missing: list[str]) -> dict[str, Any]:
    """The first table's figures on top: the real device's where there is one."""
    first = found[0] if found else None
    return {
        "helper_us_per_slice": first.helper_us_per_slice if first else None,
        "pyverbs_us_per_slice": first.pyverbs_us_per_slice if first else None,
        "ratio": first.ratio.median if first else None,
        "measured_on": first.device if first else None,
        "chain": CHAIN,
        "slice_bytes": SLICE_BYTES,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "tables": [asdict(table) for table in found],
        "missing": missing,
    }


def words(found: list[Table], missing: list[str]) -> str:
    lines = [f"{'us a slice, chains of ' + str(CHAIN):58} {'helper':>8} {'pyverbs':>8} {'ratio':>24}"]
    for table in found:
        spread = f"{table.ratio.median:.1f} [{table.ratio.low:.1f}, {table.ratio.high:.1f}]"
        lines.append(
            f"{table.device:58} {table.helper_us_per_slice:8.4f} {table.pyverbs_us_per_slice:8.4f} {spread:>24}"
        )
        lines.append(
            f"  pyverbs {table.twin}; aims: {HELPER_AIM_US} us {table.helper_aim}, {RATIO_AIM:.0f} x {table.ratio_aim}"
        )
    return "\n".join([*lines, *(f"not measured: {why}" for why in missing)])


def main() -> int:
    """0 when there is a table, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.posting", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON, all runs among them")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of runs (default %(default)s)")
    arguments = parser.parse_args()
    found, missing = tables(arguments.pairs)
    print(json.dumps(report(found, missing)) if arguments.json else words(found, missing))
    return 0 if found else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""The scheduler as a process, over gRPC on loopback: calls a second, and how long Submit and PullWork take.

    python -m tests.bench.scheduler_service --json

Leaders of groups of 8 engines pull, half of them for prefill and half for decode, each over a channel of its own; agents submit
and wait for their engines; what was given out is finished at the next pull. "pulls at 20 ms" is a row with 100 groups that pull
every 20 ms, whatever the scheduler asks for; "as asked" one where they do as it says; "as fast as it can" has every leader pull
again at once. The load comes from two processes of Python, which share the machine's cores with the scheduler: `late` is the
part of pulls that began more than an interval late. The scheduler's own time of a call, from the message to its answer, is in
the last columns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import grpc.aio
import numpy as np
import uvloop

from kvmover_proto import scheduler_pb2, scheduler_pb2_grpc
from tests.bench.cpu import process_cpu_s
from tests.scheduler_process_kit import SchedulerProcess, scheduler

RESULTS = Path(__file__).parent / "results" / "scheduler_service.jsonl"
ENGINES = 8
PROMPT_TOKENS, HIT_TOKENS = 32_000, 31_000
CALL_S = 20.0
WARM_S = 1.0
LOADS = 2
Row = dict[str, object]


@dataclass(frozen=True)
class Load:
    """`interval_s` 0: as the scheduler asks; below 0: at once. `reports`: each group's node reports, too, as it is asked to."""

    name: str
    groups: int
    interval_s: float
    submits_per_s: float
    seconds: float
    reports: bool = False


@dataclass
class Seen:
    """Of one process of the load; seconds from the call to its answer."""

    pull_s: list[float] = field(default_factory=list)
    submit_s: list[float] = field(default_factory=list)
    reports: int = 0
    assigned: int = 0
    late: int = 0


class Leader:
    """One group's leader, whose engines finish whatever they get at once."""

    def __init__(self, address: str, number: int, load: Load, seen: Seen) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),))
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._number = number
        self._load = load
        self._seen = seen
        loads = [
            scheduler_pb2.EngineLoad(engine=f"e{number}.{rank}", free_hbm_tokens=1 << 24) for rank in range(ENGINES)
        ]
        self._report = scheduler_pb2.PullWorkRequest(
            group=f"g{number}",
            model="m",
            role=scheduler_pb2.PREFILL if number % 2 else scheduler_pb2.DECODE,
            boot_id="bench",
            node=f"n{number}",
            engines=loads,
        )

    async def run(self, counted: asyncio.Event) -> None:
        loop, report, interval_s = asyncio.get_running_loop(), self._report, self._load.interval_s
        # Leaders do not begin at once, and go on by clocks of their own.
        await asyncio.sleep(WARM_S / 2 * self._number / self._load.groups)
        due_s = loop.time()
        while True:
            report.sequence += 1
            began_s = time.perf_counter()
            reply = await self._stub.PullWork(report, timeout=CALL_S)
            took_s = time.perf_counter() - began_s
            if counted.is_set():
                self._seen.pull_s.append(took_s)
            self._take(reply)
            if interval_s < 0 or reply.tell_held:
                continue
            due_s += interval_s or reply.pull_again_ms / 1000
            if counted.is_set() and loop.time() > due_s + (interval_s or 0.02):
                self._seen.late += 1
            due_s = max(due_s, loop.time() - 1.0)
            await asyncio.sleep(max(0.0, due_s - loop.time()))

    async def report_node(self, counted: asyncio.Event) -> None:
        """The node's daemon: a stream, and on it a report whenever one is wanted."""
        report = scheduler_pb2.ReportNodeRequest(
            node=self._report.node, boot_id="bench", read_rate_bytes_per_s=1 << 30, buffer_bytes=1 << 36
        )
        stream = self._stub.ReportNode()
        while True:
            report.sequence += 1
            await stream.write(report)
            reply = await stream.read()
            assert isinstance(reply, scheduler_pb2.ReportNodeReply)
            self._seen.reports += counted.is_set()
            await asyncio.sleep(reply.report_again_ms / 1000)

    def _take(self, reply: scheduler_pb2.PullWorkReply) -> None:
        report = self._report
        report.scheduler_boot_id = reply.scheduler.boot_id
        del report.done[:]
        for delivery in reply.deliveries:
            report.heard = delivery.number
            if delivery.HasField("assigned"):
                self._seen.assigned += 1
                report.done.add(request_id=delivery.assigned.request_id, attempt=delivery.assigned.attempt)


async def _submit(address: str, part: int, load: Load, seen: Seen, counted: asyncio.Event) -> None:
    """So many a second, each without waiting for the one before."""
    async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        loop, running = asyncio.get_running_loop(), set[asyncio.Task[None]]()

        async def one(number: int) -> None:
            request = scheduler_pb2.SubmitRequest(
                request_id=f"r{part}.{number}", model="m", prompt_tokens=PROMPT_TOKENS, hit_tokens=HIT_TOKENS
            )
            began_s = time.perf_counter()
            await stub.Submit(request, timeout=CALL_S)
            if counted.is_set():
                seen.submit_s.append(time.perf_counter() - began_s)

        due_s = loop.time()
        for number in itertools.count():
            task = loop.create_task(one(number))
            running.add(task)
            task.add_done_callback(running.discard)
            due_s = max(due_s + LOADS / load.submits_per_s, loop.time() - 0.1)
            await asyncio.sleep(max(0.0, due_s - loop.time()))


async def _loaded(address: str, part: int, load: Load, pipe: Connection) -> Seen:
    seen, counted = Seen(), asyncio.Event()
    loop = asyncio.get_running_loop()
    leaders = [Leader(address, number, load, seen) for number in range(part, load.groups, LOADS)]
    tasks = [loop.create_task(leader.run(counted)) for leader in leaders]
    if load.reports:
        tasks += [loop.create_task(leader.report_node(counted)) for leader in leaders]
    tasks.append(loop.create_task(_submit(address, part, load, seen, counted)))
    await asyncio.sleep(WARM_S)
    pipe.send("warm")
    counted.set()
    done, _ = await asyncio.wait(tasks, timeout=load.seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    for task in done:
        task.result()
    return seen


def _load_process(address: str, part: int, load: Load, pipe: Connection) -> None:
    pipe.send(uvloop.run(_loaded(address, part, load, pipe)))


def measure(served: SchedulerProcess, load: Load) -> Row:
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for part in range(LOADS):
        ours, theirs = context.Pipe()
        child = context.Process(target=_load_process, args=(served.address, part, load, theirs), daemon=True)
        child.start()
        pipes.append(ours)
        children.append(child)
    for pipe in pipes:
        assert pipe.poll(30.0), "the load did not begin"
        pipe.recv()
    began_s, cpu_s = time.monotonic(), process_cpu_s(served.pid)
    found: list[Seen] = []
    for pipe in pipes:
        assert pipe.poll(load.seconds + 30.0), "the load did not end"
        found.append(pipe.recv())
    cpu_s, past_s = process_cpu_s(served.pid) - cpu_s, time.monotonic() - began_s
    for child in children:
        child.join(10.0)
    return _row(load, found, cpu_s / past_s, served.status()["calls"])


def _row(load: Load, found: list[Seen], cores: float, own: dict[str, dict[str, int]]) -> Row:
    pulls = np.array([took for seen in found for took in seen.pull_s])
    submits = np.array([took for seen in found for took in seen.submit_s])
    calls = len(pulls) + len(submits)
    return {
        "load": load.name,
        "groups": load.groups,
        "calls_per_s": round(calls / load.seconds),
        "pulls_per_s": round(len(pulls) / load.seconds),
        "submits_per_s": round(len(submits) / load.seconds),
        "reports_per_s": round(sum(seen.reports for seen in found) / load.seconds),
        "pull_ms_p50": _ms(pulls, 50),
        "pull_ms_p99": _ms(pulls, 99),
        "submit_ms_p50": _ms(submits, 50),
        "submit_ms_p99": _ms(submits, 99),
        "late": round(sum(seen.late for seen in found) / max(1, len(pulls)), 3),
        "cores": round(cores, 2),
        "us_per_call": round(1e6 * cores * load.seconds / max(1, calls)),
        "own_pull_us_p99": own["pull"]["us_p99"],
        "own_submit_us_p99": own["submit"]["us_p99"],
    }


def _ms(found: np.ndarray[tuple[int], np.dtype[np.float64]], share: float) -> float:
    return round(1000 * float(np.percentile(found, share)), 2) if len(found) else 0.0


def loads(seconds: float) -> Iterator[Load]:
    yield Load("10 groups, pulls at 20 ms", 10, 0.02, 50.0, seconds)
    yield Load("100 groups, pulls at 20 ms", 100, 0.02, 200.0, seconds)
    yield Load("100 groups, pulls as asked", 100, 0.0, 200.0, seconds)
    yield Load("100 groups and their nodes, as asked", 100, 0.0, 200.0, seconds, reports=True)
    yield Load("100 groups, as fast as it can", 100, -1.0, 200.0, seconds)


def words(rows: list[Row]) -> str:
    """The table."""
    names = list(rows[0])
    widths = [max(len(name), *(len(str(row[name])) for row in rows)) for name in names]
    lines = ["  ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))]
    lines += ["  ".join(f"{row[name]!s:>{width}}" for name, width in zip(names, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def main() -> int:
    """0 when all was measured."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.scheduler_service", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON, a list of rows, instead of a table")
    parser.add_argument("--policy", default="paper", help="of the scheduler (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each row (default %(default)s)")
    parser.add_argument("--only", default="", help="rows with this text in their names")
    parser.add_argument(
        "--keep", action="store_true", help=f"append the rows to {RESULTS.name} beside the other results"
    )
    arguments = parser.parse_args()
    rows = []
    for load in loads(arguments.seconds):
        if arguments.only in load.name:
            with tempfile.TemporaryDirectory() as home, scheduler(Path(home), policy=arguments.policy) as served:
                rows.append(measure(served, load))
    print(json.dumps(rows) if arguments.json else words(rows))
    if arguments.keep:
        where = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
        with RESULTS.open("a") as results:
            told = {"bench": "scheduler_service", "unix_s": int(time.time()), "policy": arguments.policy, **where}
            results.write(json.dumps({**told, "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

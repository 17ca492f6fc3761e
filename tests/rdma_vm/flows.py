"""Loads for the experiments in the VM: a stand-in for model traffic, and KV cache; each a process that runs for a window of time.

Both ends of a stand-in lie in one process, on the VM's two devices: an RDMA write needs nobody at the far end.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from kvmoverd.adapters.transport.verbs import library
from kvmoverd.core.qos import KV_LANE, Marks

MODEL = Marks(service_level=0, traffic_class=26 << 2)
"""What collectives are told to carry: DSCP 26."""
NEAR, FAR = "rxe0", "rxe1"
SETTLE_S = 0.5
"""Of load before a window begins, so that queues are as full in all of it."""
DRAIN_S = 40.0
TIMEOUT_EXPONENT = 18
"""1.07 s, and seven tries: a lane that starves for some seconds must not fail its queue pair."""


@dataclass(frozen=True, slots=True)
class Window:
    """When to count, on the machine's monotonic clock. `period_s`: one write each so often; 0: as fast as it goes."""

    begin_s: float
    end_s: float
    period_s: float = 0.0

    @property
    def span_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass
class Moved:
    """What completed within a window; latencies from the post to the completion."""

    span_s: float
    moved_bytes: int = 0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def mb_per_s(self) -> float:
        return self.moved_bytes / self.span_s / 1e6

    def latency_ms(self, quantile: float) -> float:
        return float(np.quantile(self.latencies_s, quantile)) * 1e3 if self.latencies_s else float("nan")


class Load(Protocol):
    """Something that moves bytes, piece by piece. Of one thread."""

    depth: int
    piece_bytes: int

    def post(self, piece: int) -> None: ...

    def done(self) -> list[int]:
        """Pieces that have ended since. Raises when one failed."""

    def numbers(self) -> dict[str, list[int]]:
        """Queue pairs at both ends."""

    def close(self) -> None: ...


class Port:
    """A device, memory, and one reliable queue pair to another; by pyverbs alone, as an engine's own library would."""

    def __init__(self, device: str, size_bytes: int, gid_index: int, depth: int) -> None:
        self.lib = library.load()
        enums = self.lib.enums
        self.gid_index = gid_index
        self.access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ
        self.context = self.lib.device.Context(name=device)
        self.domain = self.lib.pd.PD(self.context)
        self.memory = np.zeros(size_bytes, dtype=np.uint8)
        self.address = self.memory.ctypes.data
        self.region = self.lib.mr.MR(self.domain, size_bytes, self.access, address=self.address)
        self.completions = self.lib.cq.CQ(self.context, 2 * depth, None, None, 0)
        room = self.lib.qp.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        kind = self.lib.qp.QPInitAttr(
            qp_type=enums.IBV_QPT_RC, scq=self.completions, rcq=self.completions, cap=room, sq_sig_all=1
        )
        self.pair = self.lib.qp.QP(self.domain, kind)

    @property
    def gid(self) -> str:
        return str(self.context.query_gid(1, self.gid_index).gid)

    def connect(self, peer: Port, marks: Marks) -> None:
        enums, addr = self.lib.enums, self.lib.addr
        route = addr.GlobalRoute(
            dgid=addr.GID(peer.gid), sgid_index=self.gid_index, hop_limit=64, traffic_class=marks.traffic_class
        )
        wanted = self.lib.qp.QPAttr(port_num=1)
        wanted.qp_access_flags = self.access
        wanted.ah_attr = addr.AHAttr(port_num=1, is_global=1, gr=route, sl=marks.service_level)
        wanted.path_mtu, wanted.dest_qp_num = enums.IBV_MTU_4096, peer.pair.qp_num
        wanted.rq_psn = wanted.sq_psn = 0
        wanted.max_rd_atomic = wanted.max_dest_rd_atomic = 16
        wanted.min_rnr_timer, wanted.timeout, wanted.retry_cnt, wanted.rnr_retry = 12, TIMEOUT_EXPONENT, 7, 7
        self.pair.to_rts(wanted)

    def post(self, peer: Port, offset: int, size_bytes: int, work_id: int, *, read: bool = False) -> None:
        """One write to the peer's memory, or one read from it."""
        enums = self.lib.enums
        place = self.lib.wr.SGE(self.address + offset, size_bytes, self.region.lkey)
        opcode = enums.IBV_WR_RDMA_READ if read else enums.IBV_WR_RDMA_WRITE
        work = self.lib.wr.SendWR(
            wr_id=work_id, opcode=opcode, num_sge=1, sg=[place], send_flags=enums.IBV_SEND_SIGNALED
        )
        work.set_wr_rdma(peer.region.rkey, peer.address + offset)
        self.pair.post_send(work)
        # pyverbs frees neither by itself.
        place.close()
        work.close()

    def poll(self) -> list[int]:
        _, ended = self.completions.poll(32)
        for one in ended:
            if one.status:
                raise RuntimeError(f"work {one.wr_id} of queue pair {self.pair.qp_num} ended with status {one.status}")
        return [int(one.wr_id) for one in ended]

    def close(self) -> None:
        for part in (self.pair, self.completions, self.region, self.domain, self.context):
            part.close()


class Writes:
    """RDMA writes from one device to the other, all with the same marks."""

    def __init__(self, marks: Marks, piece_bytes: int, depth: int, gid_index: int = 1) -> None:
        self.depth, self.piece_bytes = depth, piece_bytes
        self.near, self.far = (Port(device, piece_bytes, gid_index, depth) for device in (NEAR, FAR))
        self.near.connect(self.far, marks)
        self.far.connect(self.near, marks)

    def post(self, piece: int) -> None:
        self.near.post(self.far, 0, self.piece_bytes, piece)

    def done(self) -> list[int]:
        return self.near.poll()

    def numbers(self) -> dict[str, list[int]]:
        return {NEAR: [self.near.pair.qp_num], FAR: [self.far.pair.qp_num]}

    def close(self) -> None:
        self.near.close()
        self.far.close()


def run(load: Load, window: Window) -> Moved:
    """Keeps up to `depth` pieces under way from before the window to its end, then waits for the rest."""
    moved, posted = Moved(window.span_s), dict[int, float]()
    piece, due_s = 0, window.begin_s - SETTLE_S
    while posted or time.monotonic() < window.end_s:
        now_s = time.monotonic()
        if now_s > window.end_s + DRAIN_S:
            raise TimeoutError(f"{len(posted)} pieces did not end {DRAIN_S} s after the window")
        if len(posted) < load.depth and due_s <= now_s < window.end_s:
            posted[piece] = now_s
            load.post(piece)
            piece, due_s = piece + 1, due_s + window.period_s
            continue
        ended = load.done()
        now_s = time.monotonic()
        for one in ended:
            taken_s = now_s - posted.pop(one)
            if window.begin_s <= now_s < window.end_s:
                moved.moved_bytes += load.piece_bytes
                moved.latencies_s.append(taken_s)
        if not ended:
            time.sleep(0.0005)
    return moved


def kv_flow(marks: Marks = KV_LANE, gid_index: int = 1) -> Load:
    """KV cache as fast as it goes, with these marks."""
    return Writes(marks, 256 << 10, 8, gid_index)


def model_flow(depth: int = 8, gid_index: int = 1) -> Load:
    """Writes of 64 KiB: small enough that their latency shows the queue and not their size."""
    return Writes(MODEL, 64 << 10, depth, gid_index)


class Flow:
    """A load in a process of its own, that outlives its windows: connecting costs seconds in emulation."""

    def __init__(self, make: Any, *arguments: Any) -> None:
        self.pipe, far = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(far, make, arguments), daemon=True
        )
        self.process.start()
        far.close()
        self.numbers: dict[str, list[int]] = self._answer(60.0)

    def begin(self, window: Window) -> None:
        self.pipe.send(window)

    def end(self) -> Moved:
        moved: Moved = self._answer(DRAIN_S + 60.0)
        return moved

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(10.0)
        self.process.kill()

    def _answer(self, timeout_s: float) -> Any:
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"a flow said nothing for {timeout_s} s")
        answer = self.pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"a flow failed:\n{answer}")
        return answer


def _serve(pipe: Connection, make: Any, arguments: tuple[Any, ...]) -> None:
    try:
        load = make(*arguments)
        pipe.send(load.numbers())
        while window := pipe.recv():
            pipe.send(run(load, window))
        load.close()
    except EOFError:
        return
    except Exception:  # noqa: BLE001 - the parent raises it
        pipe.send(traceback.format_exc())


@contextmanager
def flows(**wanted: tuple[Any, ...]) -> Iterator[dict[str, Flow]]:
    """Named flows, each of a maker and its arguments; ended afterwards whatever happens."""
    library.load()
    made: dict[str, Flow] = {}
    try:
        for name, (make, *arguments) in wanted.items():
            made[name] = Flow(make, *arguments)
        yield made
    finally:
        for flow in made.values():
            flow.close()

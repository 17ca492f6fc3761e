"""A stand-in for model traffic: RDMA writes with the model's marks, by pyverbs alone, as an engine's own library would do it.

Both ends lie in one process, on the VM's two devices: an RDMA write needs nobody at the far end.
"""

from __future__ import annotations

import numpy as np

from kvmoverd.adapters.transport.verbs import library
from kvmoverd.core.qos import Marks

MODEL = Marks(service_level=0, traffic_class=26 << 2)
"""What collectives are told to carry: DSCP 26."""
NEAR, FAR = "rxe0", "rxe1"
TIMEOUT_EXPONENT = 18
"""1.07 s, and seven tries: a lane that starves for some seconds must not fail its queue pair."""


class Port:
    """A device, memory, and one reliable queue pair to another."""

    def __init__(self, device: str, size_bytes: int, gid_index: int, depth: int) -> None:
        self.lib = library.load()
        enums = self.lib.enums
        self.gid_index = gid_index
        self.access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
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

    def post(self, peer: Port, offset: int, size_bytes: int, work_id: int) -> None:
        """One write to the peer's memory."""
        enums = self.lib.enums
        place = self.lib.wr.SGE(self.address + offset, size_bytes, self.region.lkey)
        work = self.lib.wr.SendWR(
            wr_id=work_id, opcode=enums.IBV_WR_RDMA_WRITE, num_sge=1, sg=[place], send_flags=enums.IBV_SEND_SIGNALED
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
    """A `Load` of RDMA writes from one device to the other: small, so that their latency shows the queue and not their size."""

    def __init__(self, marks: Marks = MODEL, gid_index: int = 1, depth: int = 8, piece_bytes: int = 64 << 10) -> None:
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

"""The one step of a queue pair that may take a second: ready to receive, it knows its peer's place in the network.

On Ethernet the kernel asks for the peer's hardware address, and waits a second for one that does not answer. Straight through
libibverbs the interpreter's lock is not held meanwhile; pyverbs holds it.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kvmoverd.adapters.transport.verbs.library import Library

_U8, _U16, _U32 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32
_CAPACITY_WORDS = 5


class GlobalRoute(ctypes.Structure):
    """`struct ibv_global_route`."""

    _fields_ = [
        ("dgid", ctypes.c_uint64 * 2),
        ("flow_label", _U32),
        ("sgid_index", _U8),
        ("hop_limit", _U8),
        ("traffic_class", _U8),
    ]


class Vector(ctypes.Structure):
    """`struct ibv_ah_attr`."""

    _fields_ = [
        ("grh", GlobalRoute),
        ("dlid", _U16),
        *[(name, _U8) for name in ("sl", "src_path_bits", "static_rate", "is_global", "port_num")],
    ]


class Attributes(ctypes.Structure):
    """`struct ibv_qp_attr`, which the binary interface of libibverbs keeps as it is."""

    _fields_ = [
        *[(name, _U32) for name in ("qp_state", "cur_qp_state", "path_mtu", "path_mig_state", "qkey")],
        *[(name, _U32) for name in ("rq_psn", "sq_psn", "dest_qp_num", "qp_access_flags")],
        ("cap", _U32 * _CAPACITY_WORDS),
        ("ah_attr", Vector),
        ("alt_ah_attr", Vector),
        *[(name, _U16) for name in ("pkey_index", "alt_pkey_index")],
        *[(name, _U8) for name in ("en_sqd_async_notify", "sq_draining", "max_rd_atomic", "max_dest_rd_atomic")],
        *[(name, _U8) for name in ("min_rnr_timer", "port_num", "timeout", "retry_cnt", "rnr_retry")],
        *[(name, _U8) for name in ("alt_port_num", "alt_timeout")],
        ("rate_limit", _U32),
    ]


def reach(library: Library, pointer: int, asked: Any, gid: bytes) -> None:
    """The queue pair whose `struct ibv_qp` lies at `pointer` gets ready to receive. Blocks without the interpreter's lock.

    `asked`: pyverbs' attributes; `gid`: of the peer. Raises `OSError`.
    """
    enums, vector = library.enums, asked.ah_attr
    told = Attributes(
        qp_state=enums.IBV_QPS_RTR,
        path_mtu=asked.path_mtu,
        rq_psn=asked.rq_psn,
        dest_qp_num=asked.dest_qp_num,
        max_dest_rd_atomic=asked.max_dest_rd_atomic,
        min_rnr_timer=asked.min_rnr_timer,
    )
    told.ah_attr.dlid, told.ah_attr.sl, told.ah_attr.port_num = vector.dlid, vector.sl, vector.port_num
    told.ah_attr.is_global = vector.is_global
    if vector.is_global:
        route = told.ah_attr.grh
        ctypes.memmove(route.dgid, gid, ctypes.sizeof(route.dgid))
        route.flow_label, route.sgid_index = vector.flow_label, vector.sgid_index
        route.hop_limit, route.traffic_class = vector.hop_limit, vector.traffic_class
    mask = (
        enums.IBV_QP_STATE
        | enums.IBV_QP_AV
        | enums.IBV_QP_PATH_MTU
        | enums.IBV_QP_DEST_QPN
        | enums.IBV_QP_RQ_PSN
        | enums.IBV_QP_MAX_DEST_RD_ATOMIC
        | enums.IBV_QP_MIN_RNR_TIMER
    )
    code = _modify()(pointer, ctypes.byref(told), mask)
    if code:
        raise OSError(code, "ready to receive")


def _modify() -> Any:
    call = ctypes.CDLL("libibverbs.so.1").ibv_modify_qp
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    return call

"""All checks in the order in which they are shown; the command adds those that need the whole config."""

from __future__ import annotations

from kvmoverd.adapters.doctor.counters import check_counters, check_pauses
from kvmoverd.adapters.doctor.finding import Check
from kvmoverd.adapters.doctor.gpus import check_acs, check_gpu_memory, check_iommu, check_paths
from kvmoverd.adapters.doctor.lanes import check_override, check_qdisc, check_sl2vl, check_tcp_lane, check_tcp_mtu
from kvmoverd.adapters.doctor.limits import check_files, check_groups, check_maps, check_memlock, check_unit
from kvmoverd.adapters.doctor.rdma import check_gids, check_library, check_ports, check_posting
from kvmoverd.adapters.doctor.storage_nic import check_storage_nic
from kvmoverd.adapters.doctor.system import (
    URING_S,
    check_clock,
    check_copy_loop,
    check_huge_pages,
    check_kernel,
    check_ptrace,
    check_shm,
    check_uring,
)

LIBRARY_S = 30.0
"""Firmware may take its time when a device is opened, and a busy machine when a library is loaded."""

CHECKS = (
    Check("rdma_ports", check_ports),
    Check("rdma_library", check_library, LIBRARY_S),
    Check("rdma_posting", check_posting, LIBRARY_S),
    Check("gids", check_gids),
    Check("lane_override", check_override),
    Check("sl2vl", check_sl2vl),
    Check("rdma_counters", check_counters, watches=True),
    Check("pause_frames", check_pauses, watches=True),
    Check("gpu_paths", check_paths),
    Check("gpu_memory", check_gpu_memory),
    Check("acs", check_acs),
    Check("iommu", check_iommu),
    Check("storage_nic", check_storage_nic),
    Check("tcp_mtu", check_tcp_mtu),
    Check("tcp_lane", check_tcp_lane),
    Check("tcp_queues", check_qdisc),
    Check("memlock", check_memlock),
    Check("open_files", check_files),
    Check("groups", check_groups),
    Check("unit", check_unit),
    Check("huge_pages", check_huge_pages),
    Check("shm", check_shm),
    Check("max_map_count", check_maps),
    Check("ptrace", check_ptrace),
    Check("io_uring", check_uring, URING_S),
    Check("copy_loop", check_copy_loop, LIBRARY_S),
    Check("kernel", check_kernel),
    Check("clock", check_clock),
)

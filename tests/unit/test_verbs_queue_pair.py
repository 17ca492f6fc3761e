"""What can be held against a queue pair without a device: marks that were read back, and structs found by their content."""

from __future__ import annotations

import ctypes
import errno
import mmap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvmoverd.adapters.memory import libc
from kvmoverd.adapters.transport.verbs import queue_pair
from kvmoverd.adapters.transport.verbs.fabric import FabricError
from kvmoverd.adapters.transport.verbs.pointers import domain_address, queue_pair_address
from kvmoverd.adapters.transport.verbs.ports import LinkLayer, place_of
from kvmoverd.adapters.transport.verbs.queue_pair import compare_marks
from kvmoverd.core.qos import Marks

WHO = "<queue pair 17 of mlx5_0:1>"
ASKED = Marks(service_level=2, traffic_class=0x20, flow_label=5)


@dataclass
class Found:
    """As pyverbs tells a route."""

    sl: int = 2
    traffic_class: int = 0x20
    flow_label: int = 5


def test_on_infiniband_the_service_level_counts() -> None:
    compare_marks(WHO, LinkLayer.INFINIBAND, ASKED, Found(traffic_class=0, flow_label=0))
    with pytest.raises(FabricError, match=r"<queue pair 17 .*given service level 2 and has 0: .*`kvmoverd doctor`"):
        compare_marks(WHO, LinkLayer.INFINIBAND, ASKED, Found(sl=0))


def test_on_ethernet_the_traffic_class_counts_and_the_flow_label_where_it_is_told() -> None:
    compare_marks(WHO, LinkLayer.ETHERNET, ASKED, Found(sl=0, flow_label=0))
    with pytest.raises(FabricError, match=r"given traffic class 32 and has 104"):
        compare_marks(WHO, LinkLayer.ETHERNET, ASKED, Found(traffic_class=104))
    with pytest.raises(FabricError, match=r"given flow label 5 and has 6"):
        compare_marks(WHO, LinkLayer.ETHERNET, ASKED, Found(flow_label=6))


class Refused(Exception):
    error_code = errno.EIO


@pytest.mark.parametrize(
    ("code", "now", "is_kept"),
    [
        (errno.EIO, "gone", False),
        (errno.EIO, "another", False),
        (errno.EIO, "there", True),
        (errno.EBUSY, "gone", True),
    ],
)
def test_a_queue_pair_is_destroyed_with_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, now: str, is_kept: bool
) -> None:
    def close() -> None:
        refused = Refused("Failed to destroy QP")
        refused.error_code = code
        raise refused

    device = tmp_path / "mlx5_0"
    device.mkdir()
    home = SimpleNamespace(
        library=SimpleNamespace(error=Refused),
        facts=SimpleNamespace(name="mlx5_0:1", device="mlx5_0"),
        place=place_of("mlx5_0", sysfs=tmp_path),
    )
    if now != "there":
        device.rename(tmp_path / "mlx5_1")
    if now == "another":
        device.mkdir()
    monkeypatch.setattr(queue_pair, "place_of", partial(place_of, sysfs=tmp_path))
    gone: list[int] = []
    pair = queue_pair.VerbsQueuePair.__new__(queue_pair.VerbsQueuePair)
    pair.number, pair.handle, pair._gone = 17, SimpleNamespace(close=close), gone.append
    pair._home, pair._posts = home, SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    if is_kept:
        with pytest.raises(FabricError, match=r"<queue pair 17 of mlx5_0:1> can't be destroyed"):
            pair.destroy()
    else:
        pair.destroy()
    assert gone == ([] if is_kept else [17])


# Objects of ctypes point to their struct, as those of pyverbs do.


class Context(ctypes.Structure):
    _fields_ = [
        ("_ops", ctypes.c_char * 264),
        ("cmd_fd", ctypes.c_int),
        ("_async_fd", ctypes.c_int),
        ("num_comp_vectors", ctypes.c_int),
        ("_", ctypes.c_char * 64),
    ]


class Domain(ctypes.Structure):
    _fields_ = [("context", ctypes.c_uint64), ("handle", ctypes.c_uint32), ("_", ctypes.c_char * 64)]


class Pair(ctypes.Structure):
    _fields_ = [
        ("context", ctypes.c_uint64),
        ("_1", ctypes.c_uint64),
        ("pd", ctypes.c_uint64),
        ("_2", ctypes.c_char * 28),
        ("qp_num", ctypes.c_uint32),
        ("_3", ctypes.c_uint32),
        ("qp_type", ctypes.c_uint32),
        ("_4", ctypes.c_char * 64),
    ]


def world() -> tuple[Pair, Domain, Context]:
    context = Context(cmd_fd=7, num_comp_vectors=4)
    domain = Domain(context=ctypes.addressof(context), handle=3)
    pair = Pair(context=ctypes.addressof(context), pd=ctypes.addressof(domain), qp_num=17, qp_type=2)
    return pair, domain, context


def test_structs_are_found_where_all_that_is_told_of_them_agrees() -> None:
    pair, domain, context = world()
    assert queue_pair_address(pair, domain, context) == ctypes.addressof(pair)
    assert domain_address(domain, context) == ctypes.addressof(domain)


@dataclass
class Told:
    cmd_fd: int = 7
    num_comp_vectors: int = 4
    handle: int = 3


@pytest.mark.parametrize("told", [Told(cmd_fd=8), Told(num_comp_vectors=5), Told(handle=4)])
def test_one_word_that_disagrees_is_enough_to_doubt(told: Told) -> None:
    pair, _, _context = world()
    assert queue_pair_address(pair, told, told) == 0


def test_a_queue_pair_of_another_device_is_not_believed() -> None:
    pair, domain, context = world()
    twin = Context(cmd_fd=7, num_comp_vectors=4)
    pair.context = ctypes.addressof(twin)
    assert queue_pair_address(pair, domain, context) == 0


@pytest.mark.parametrize("address", [0, 8, 1 << 20, 0x7FFF_FFFF_F000, (1 << 64) - 8, 12_345])
def test_an_address_that_leads_nowhere_is_an_error_and_no_signal(address: int) -> None:
    pair, domain, context = world()
    pair.pd = address
    assert queue_pair_address(pair, domain, context) == 0


def test_memory_that_may_not_be_read_is_no_struct() -> None:
    pair, domain, context = world()
    hole = libc.map_memory(4096, mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0, mmap.MAP_PRIVATE | mmap.MAP_ANON)
    pair.pd = hole
    assert queue_pair_address(pair, domain, context) == 0
    libc.unmap_memory(hole, 4096)

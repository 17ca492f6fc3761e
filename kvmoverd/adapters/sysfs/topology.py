"""Which CNIC is nearest to a GPU, or to memory: by the PCIe bridges between them, then by NUMA node, then by use."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from kvmoverd.adapters.sysfs.infiniband import device_path
from kvmoverd.adapters.sysfs.pci import PciPath, pci_path
from kvmoverd.adapters.sysfs.tree import Tree, UnreadableError

_NODES = "/sys/devices/system/node"
_SWITCH_HOPS = 2
"""From a switch's upstream port down: a downstream port, then the device."""
_FAR_AWAY = 1 << 16
"""Behind every distance that a firmware gives: it is one byte."""


class Distance(enum.IntEnum):
    """Between two PCI devices, nearest first, in the words of `nvidia-smi topo`."""

    PIX = 0
    """One switch, or one bridge."""
    PXB = 1
    """Several switches, but not the CPU."""
    PHB = 2
    """The CPU's host bridge."""
    NODE = 3
    """Two host bridges of one NUMA node."""
    SYS = 4
    """The link between two sockets; or nobody says."""


@dataclass(frozen=True, slots=True)
class Cnic:
    """A candidate. `name`: "mlx5_0" or "mlx5_0:1"; `users`: how much is served by it already.

    `numa_node`: -1 where only sysfs may know.
    """

    name: str
    users: int = 0
    numa_node: int = -1


def distance(one: PciPath, other: PciPath, *, nodes: int = 0) -> Distance:
    """`nodes`: how many NUMA nodes the machine has; 0: not known."""
    if one.host_bridge != other.host_bridge:
        same = one.numa_node == other.numa_node and (one.numa_node >= 0 or nodes == 1)
        return Distance.NODE if same else Distance.SYS
    shared = shared_bridges(one, other)
    if not shared:
        return Distance.PHB
    longest = max(len(one.addresses), len(other.addresses)) - shared
    return Distance.PIX if longest <= _SWITCH_HOPS else Distance.PXB


def shared_bridges(one: PciPath, other: PciPath) -> int:
    """How many bridges, from the host bridge on, both hang behind."""
    pairs = zip(one.addresses[:-1], other.addresses[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def between(one: PciPath, other: PciPath) -> list[str]:
    """Addresses of the bridges that traffic between the two passes below what they share."""
    shared = shared_bridges(one, other)
    return [address for path in (one, other) for address in path.addresses[shared:-1]]


def nodes_count(tree: Tree) -> int:
    """NUMA nodes of the machine; 0: the kernel does not say. Raises `UnreadableError`."""
    return sum(name.startswith("node") and name[4:].isdecimal() for name in tree.names(_NODES))


def node_distances(tree: Tree, node: int) -> list[int]:
    """From one NUMA node to each, as the firmware gives them; 10 is the node itself. Raises `UnreadableError`."""
    words = (tree.text(f"{_NODES}/node{node}/distance") or "").split()
    return [int(word) for word in words if word.isdecimal()]


def nearest_cnic(
    root: Path, gpu_pci_address: str | None, numa_node: int | None, cnics: Sequence[Cnic]
) -> tuple[int, str]:
    """Index of the CNIC for a GPU, or for memory on a NUMA node (None or -1: not known), and why, in words.

    Of those equally near the one with the fewest users, then the first. What sysfs does not say is no error: the choice
    falls back to the NUMA node, then to the number of users. `cnics` must not be empty.
    """
    assert cnics, "no CNIC to choose from"
    tree, wanted = Tree(root), -1 if numa_node is None else numa_node
    try:
        places = [_place(tree, cnic) for cnic in cnics]
        gpu = pci_path(tree, gpu_pci_address) if gpu_pci_address else None
        if gpu is not None and any(place.path for place in places):
            return _nearest_to_gpu(tree, gpu, places)
        index, why = _nearest_to_node(tree, gpu.numa_node if gpu and wanted < 0 else wanted, places)
    except UnreadableError as error:
        index, why = _least([_Place(cnic, None, -1) for cnic in cnics], lambda place: ())
        return index, f"{why}, as {error}"
    return index, f"there is no PCI device {gpu_pci_address}; {why}" if gpu_pci_address and gpu is None else why


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a CNIC: `path` is None for a virtual device."""

    cnic: Cnic
    path: PciPath | None
    numa_node: int


def _place(tree: Tree, cnic: Cnic) -> _Place:
    path = device_path(tree, cnic.name.partition(":")[0])
    known = cnic.numa_node if path is None or cnic.numa_node >= 0 else path.numa_node
    return _Place(cnic, path, known)


def _nearest_to_gpu(tree: Tree, gpu: PciPath, places: Sequence[_Place]) -> tuple[int, str]:
    nodes, apart = nodes_count(tree), node_distances(tree, gpu.numa_node)

    def kind(place: _Place) -> Distance:
        return Distance.SYS if place.path is None else distance(gpu, place.path, nodes=nodes)

    index, why = _least(places, lambda place: (kind(place), _apart(apart, place.numa_node)))
    return index, f"{why}, {kind(places[index]).name} to GPU {gpu.address}"


def _nearest_to_node(tree: Tree, numa_node: int, places: Sequence[_Place]) -> tuple[int, str]:
    if numa_node < 0 or all(place.numa_node < 0 for place in places):
        index, why = _least(places, lambda place: ())
        return index, f"{why}; which is near is not known"
    apart = node_distances(tree, numa_node)

    def far(place: _Place) -> tuple[bool, int]:
        return place.numa_node != numa_node, _apart(apart, place.numa_node)

    index, why = _least(places, far)
    return index, f"{why}, on NUMA node {places[index].numa_node} for memory of node {numa_node}"


def _apart(distances: Sequence[int], node: int) -> int:
    return distances[node] if 0 <= node < len(distances) else _FAR_AWAY


def _least(places: Sequence[_Place], rank: Callable[[_Place], tuple[int, ...]]) -> tuple[int, str]:
    """Of the least rank the one with the fewest users, then the first; and how it stands among its equals."""
    index = min(range(len(places)), key=lambda at: (rank(places[at]), places[at].cnic.users, at))
    best = places[index]
    equals = sum(rank(place) == rank(best) for place in places)
    users = f" with {best.cnic.users} users, the fewest of {equals} alike" if equals > 1 else ""
    return index, f"{best.cnic.name}{users}"

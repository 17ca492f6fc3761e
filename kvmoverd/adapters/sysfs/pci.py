"""Devices of the PCI bus: where they hang, what they are, and what bridges do with traffic between two of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvmoverd.adapters.sysfs.tree import Tree
from kvmoverd.core.pci import pci_address

_DEVICES = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_GPU_VENDORS = ("0x10de", "0x1002")
"""NVIDIA, AMD."""
_MELLANOX = "0x15b3"
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""Display, 3D and other display controllers, processing accelerators."""

_EXTENDED_FROM = 0x100
_ACS_CAPABILITY = 0x000D
_ACS_CONTROL_AT = 6
_CAPABILITIES_MAX = 64
_REDIRECTS = 0x4 | 0x8
"""P2P Request Redirect and P2P Completion Redirect: what goes from one device to its neighbour goes by the CPU."""


@dataclass(frozen=True, slots=True)
class PciPath:
    """The way to a device: its host bridge ("pci0000:16"), then the addresses of the bridges, last its own.

    `numa_node`: -1 where the firmware says none.
    """

    host_bridge: str
    addresses: tuple[str, ...]
    numa_node: int

    @property
    def address(self) -> str:
        return self.addresses[-1]


def path_of(tree: Tree, directory: str) -> PciPath | None:
    """Of the device behind a directory of sysfs, itself on the bus or below; None where none is: virtual devices."""
    real = tree.real(directory)
    if real is None:
        return None
    parts = real.split("/")
    addresses = tuple(part for part in parts if _ADDRESS.fullmatch(part))
    if not addresses:
        return None
    host_bridge = next((part for part in parts if _HOST_BRIDGE.fullmatch(part)), "")
    numa_node = tree.number(f"{real[: real.index(addresses[-1]) + len(addresses[-1])]}/numa_node")
    return PciPath(host_bridge, addresses, -1 if numa_node is None else numa_node)


def pci_path(tree: Tree, address: str) -> PciPath | None:
    """None where there is no such device. `address` as any tool prints it."""
    try:
        return path_of(tree, f"{_DEVICES}/{pci_address(address)}")
    except ValueError:
        return None


def gpus(tree: Tree) -> list[PciPath]:
    """NVIDIA's and AMD's, by their address. Raises `UnreadableError`."""
    found = []
    for address in tree.names(_DEVICES):
        vendor, kind = (tree.text(f"{_DEVICES}/{address}/{name}") or "" for name in ("vendor", "class"))
        if vendor in _GPU_VENDORS and kind.startswith(_GPU_CLASSES) and (path := pci_path(tree, address)):
            found.append(path)
    return found


def redirects(tree: Tree, address: str) -> bool | None:
    """Does this bridge send traffic between its neighbours up to the CPU (ACS)? None: its registers can't be read.

    Only root sees them; others get the first 64 bytes. Raises `UnreadableError`.
    """
    config = tree.content(f"{_DEVICES}/{address}/config")
    if config is None or len(config) <= _EXTENDED_FROM:
        return None
    at = _EXTENDED_FROM
    for _ in range(_CAPABILITIES_MAX):
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS_CAPABILITY:
            control = int.from_bytes(config[at + _ACS_CONTROL_AT : at + _ACS_CONTROL_AT + 2], "little")
            return bool(control & _REDIRECTS)
        at = header >> 20
        if at < _EXTENDED_FROM:
            break
    return False


def iommu_type(tree: Tree, address: str) -> str:
    """ "identity", "DMA", "DMA-FQ"; empty without an IOMMU. Raises `UnreadableError`."""
    return tree.text(f"{_DEVICES}/{address}/iommu_group/type") or ""


def narrowed(tree: Tree, address: str) -> str:
    """How a device's link is slower than it could be; empty where it is not, or nobody says. Raises `UnreadableError`."""
    home, found = f"{_DEVICES}/{address}", []
    for name in ("link_speed", "link_width"):
        now, most = (tree.text(f"{home}/{which}_{name}") or "" for which in ("current", "max"))
        if now and most and now != most:
            found.append(f"{name.replace('_', ' ')} {now} of {most}")
    return ", ".join(found)


def without_rdma(tree: Tree) -> list[str]:
    """Addresses of NVIDIA's network cards for which no driver made an RDMA device. Raises `UnreadableError`."""
    found = []
    for address in tree.names(_DEVICES):
        vendor, kind = (tree.text(f"{_DEVICES}/{address}/{name}") or "" for name in ("vendor", "class"))
        if vendor == _MELLANOX and kind.startswith("0x02") and not tree.names(f"{_DEVICES}/{address}/infiniband"):
            found.append(address)
    return found

"""Network interfaces, as /sys/class/net shows them."""

from __future__ import annotations

from kvmoverd.adapters.sysfs.tree import Tree

_CLASS = "/sys/class/net"
_WITHIN = ("bridge", "vxlan", "geneve", "wireguard")
_ROCE_HEADERS_BYTES = 96
"""What the kernel keeps free for a RoCE packet's headers, the largest ones."""
_PATH_MTUS_BYTES = (4096, 2048, 1024, 512, 256)
ROCE_MTU_BYTES = 4200
"""Of an interface, and more than enough for RDMA packets of 4096 bytes."""


def interfaces(tree: Tree) -> list[str]:
    """Without the loopback interface. Raises `UnreadableError`."""
    return [name for name in tree.names(_CLASS) if name != "lo"]


def mtu_bytes(tree: Tree, name: str) -> int | None:
    return tree.number(f"{_CLASS}/{name}/mtu")


def is_up(tree: Tree, name: str) -> bool:
    """Drivers that can't tell ("unknown") count as up."""
    return tree.text(f"{_CLASS}/{name}/operstate") in ("up", "unknown")


def is_within(tree: Tree, name: str) -> bool:
    """Made for containers and virtual machines of this host, or a tunnel: other nodes are not reached by its address."""
    return any(f"DEVTYPE={kind}" in tree.lines(f"{_CLASS}/{name}/uevent") for kind in _WITHIN)


def roce_mtu_bytes(interface_mtu_bytes: int) -> int:
    """The largest RDMA packet that fits; 0 for none.

    >>> roce_mtu_bytes(1500), roce_mtu_bytes(4200), roce_mtu_bytes(9000)
    (1024, 4096, 4096)
    """
    room_bytes = interface_mtu_bytes - _ROCE_HEADERS_BYTES
    return next((size for size in _PATH_MTUS_BYTES if size <= room_bytes), 0)

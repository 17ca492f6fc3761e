"""RDMA devices and their ports, as /sys/class/infiniband shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvmoverd.adapters.sysfs.pci import PciPath, path_of
from kvmoverd.adapters.sysfs.tree import Tree, UnreadableError

_CLASS = "/sys/class/infiniband"
ETHERNET, INFINIBAND = "Ethernet", "InfiniBand"
_GIDS_MAX = 32
"""Places of the table that are looked at for an interface; most tables are empty behind the first few."""


@dataclass(frozen=True, slots=True)
class Port:
    """`state`: "ACTIVE", "DOWN", ...; `rate`: as the driver words it; `netdev`: empty on InfiniBand, or where not told."""

    device: str
    number: int
    state: str
    physical: str
    link_layer: str
    rate: str
    lid: int
    netdev: str

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def directory(self) -> str:
        return f"{_CLASS}/{self.device}/ports/{self.number}"


def devices(tree: Tree) -> list[str]:
    """Raises `UnreadableError`."""
    return tree.names(_CLASS)


def device_path(tree: Tree, device: str) -> PciPath | None:
    """Where a device hangs; None for a virtual one, unless its network interface is a real one."""
    path = path_of(tree, f"{_CLASS}/{device}/device")
    if path is None and (netdev := tree.text(f"{_CLASS}/{device}/parent")):
        path = path_of(tree, f"/sys/class/net/{netdev}/device")
    return path


def firmware(tree: Tree, device: str) -> str:
    """Version and board, as far as they are told. Raises `UnreadableError`."""
    words = (tree.text(f"{_CLASS}/{device}/{name}") for name in ("fw_ver", "hca_type", "board_id"))
    return " ".join(word for word in words if word)


def ports(tree: Tree) -> list[Port]:
    """Of all devices, in their order. Raises `UnreadableError`."""
    found = []
    for device in devices(tree):
        for number in tree.names(f"{_CLASS}/{device}/ports"):
            if number.isdecimal():
                found.append(_port(tree, device, int(number)))
    return found


def _port(tree: Tree, device: str, number: int) -> Port:
    home = f"{_CLASS}/{device}/ports/{number}"
    link_layer = tree.text(f"{home}/link_layer") or ""
    return Port(
        device,
        number,
        state=_word(tree.text(f"{home}/state")),
        physical=_word(tree.text(f"{home}/phys_state")),
        link_layer=link_layer,
        rate=tree.text(f"{home}/rate") or "",
        lid=tree.number(f"{home}/lid") or 0,
        netdev=_netdev(tree, device, number) if link_layer == ETHERNET else "",
    )


def _word(text: str | None) -> str:
    """Of "4: ACTIVE"."""
    return (text or "").rpartition(":")[2].strip()


def _netdev(tree: Tree, device: str, number: int) -> str:
    """The interface that the first GID belongs to; else that of the device, by port number where it has several."""
    attributes = f"{_CLASS}/{device}/ports/{number}/gid_attrs/ndevs"
    for index in tree.names(attributes)[:_GIDS_MAX]:
        if netdev := tree.text(f"{attributes}/{index}"):
            return netdev
    if parent := tree.text(f"{_CLASS}/{device}/parent"):
        return parent
    names = tree.names(f"{_CLASS}/{device}/device/net")
    by_port = [name for name in names if (tree.number(f"/sys/class/net/{name}/dev_port") or 0) == number - 1]
    return (by_port or names or [""])[0]


def counters(tree: Tree, port: Port) -> Mapping[str, int]:
    """All that are readable, of the port and of the hardware behind it; a name that both have is the port's.

    Empty where the driver has none.
    """
    found: dict[str, int] = {}
    for directory in ("hw_counters", "counters"):
        for name in tree.names(f"{port.directory}/{directory}"):
            try:
                number = tree.number(f"{port.directory}/{directory}/{name}")
            except UnreadableError:
                continue
            if number is not None:
                found[name] = number
    return found

"""Which of a port's addresses to use: a ranking of its GID table, and one line that says why.

RoCE v2 comes before v1 whatever the address: v1 is not routed, and its packets have no DSCP to tell a lane by. Then addresses
that work between machines come before those that only may.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path

from kvmoverd.core.errors import TransportRefused

INFINIBAND = "IB"
ROCE_1 = "RoCE v1"
ROCE_2 = "RoCE v2"
ANY_INDEX = -1
_NULL = bytes(16)
_GID = re.compile(r"[0-9a-fA-F]{4}(:[0-9a-fA-F]{4}){7}")
_NULL_TEXT = ":".join(["0000"] * 8)
_TEXT_BYTES_MAX = 256
_OVERLAY = re.compile(r"(docker|br-|cni|flannel|cali|cilium|lxc|vxlan|geneve|tun|weave|virbr|kube|ovn)", re.IGNORECASE)
_PRIVATE_4 = tuple(IPv4Network(net) for net in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"))
_PRIVATE_6 = IPv6Network("fc00::/7")


@dataclass(frozen=True, slots=True)
class Gid:
    """One row of a port's table. `netdev`: the network interface that it stands for, "" where none is told."""

    index: int
    raw: bytes
    kind: str
    netdev: str = ""

    @property
    def address(self) -> IPv4Address | IPv6Address:
        whole = IPv6Address(self.raw)
        return whole.ipv4_mapped or whole

    @property
    def text(self) -> str:
        return f"::ffff:{self.address}" if isinstance(self.address, IPv4Address) else str(self.address)


class Rank(enum.IntEnum):
    """Best first; `choose` says the words."""

    ROUTABLE = 0
    ROUTABLE_NO_NETDEV = 1
    PRIVATE = 2
    PRIVATE_NO_NETDEV = 3
    OVERLAY = 4
    LINK_LOCAL = 5
    OTHER = 6


_WORDS = {
    Rank.ROUTABLE: "",
    Rank.ROUTABLE_NO_NETDEV: "no interface told",
    Rank.PRIVATE: "",
    Rank.PRIVATE_NO_NETDEV: "private address, no interface told",
    Rank.OVERLAY: "degraded: the interface looks like an overlay's",
    Rank.LINK_LOCAL: "degraded: link-local, reaches only its own segment",
    Rank.OTHER: "degraded: neither unicast nor private",
}


@dataclass(frozen=True, slots=True)
class Choice:
    gid: Gid
    words: str
    """Such as "GID 1 of 4: ::ffff:10.77.0.1, RoCE v2, veth0"."""


def rank(gid: Gid) -> Rank:
    """How far an address reaches.

    >>> rank(Gid(0, IPv6Address("fe80::1").packed, ROCE_2, "bond0")).name
    'LINK_LOCAL'
    >>> rank(Gid(1, IPv6Address("::ffff:10.77.0.1").packed, ROCE_2, "eth2")).name
    'PRIVATE'
    """
    address = gid.address
    if address.is_link_local:
        return Rank.LINK_LOCAL
    if address.is_multicast or address.is_loopback or address.is_unspecified:
        return Rank.OTHER
    if _OVERLAY.match(gid.netdev):
        return Rank.OVERLAY
    if _is_private(address):
        return Rank.PRIVATE if gid.netdev else Rank.PRIVATE_NO_NETDEV
    return Rank.ROUTABLE if gid.netdev else Rank.ROUTABLE_NO_NETDEV


def choose(gids: Sequence[Gid], *, port: str, infiniband: bool = False, wanted: int = ANY_INDEX) -> Choice:
    """The best of a table, or the one at index `wanted`. Raises `TransportRefused` where there is none, with the table.

    On InfiniBand all GIDs are the subnet's own, and the first one is the port's.
    """
    usable = [gid for gid in gids if gid.raw != _NULL]
    if wanted != ANY_INDEX:
        usable_here = [gid for gid in usable if gid.index == wanted]
        if not usable_here:
            raise TransportRefused(
                f"{port} has no GID {wanted}; it has {_table(usable)}: set transport.verbs.gid_index"
            )
        chosen = usable_here[0]
    elif not usable:
        raise TransportRefused(f"{port} has no GID: give its network interface an address, and see that the link is up")
    else:
        chosen = min(usable, key=lambda gid: gid.index) if infiniband else min(usable, key=_order)
    why = "" if infiniband else _WORDS[rank(chosen)]
    parts = [chosen.text, chosen.kind, chosen.netdev, why, "as configured" if wanted != ANY_INDEX else ""]
    return Choice(chosen, f"GID {chosen.index} of {len(usable)}: {', '.join(part for part in parts if part)}")


def read_table(port: Path) -> list[Gid]:
    """The rows of a port's directory in sysfs that are not empty, by index. What can't be read is no row."""
    infiniband = _text(f"{port}/link_layer") == "InfiniBand"
    found = []
    for index in _indices(port / "gids"):
        told = _text(f"{port}/gids/{index}")
        if not told or told == _NULL_TEXT:
            continue
        kind = _kind(_text(f"{port}/gid_attrs/types/{index}"), infiniband=infiniband)
        netdev = _text(f"{port}/gid_attrs/ndevs/{index}")
        if _GID.fullmatch(told):
            found.append(Gid(index, bytes.fromhex(told.replace(":", "")), kind, netdev))
    return found


def _kind(told: str, *, infiniband: bool) -> str:
    """The kernel says "IB/RoCE v1" for both."""
    if told == ROCE_2:
        return ROCE_2
    return INFINIBAND if infiniband else ROCE_1


def _order(gid: Gid) -> tuple[bool, int, bool, int]:
    """IPv4 before IPv6 where both reach as far, so that two nodes with both choose alike."""
    return gid.kind != ROCE_2, rank(gid), isinstance(gid.address, IPv6Address), gid.index


def _is_private(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv4Address):
        return any(address in net for net in _PRIVATE_4)
    return address in _PRIVATE_6


def _table(gids: Sequence[Gid]) -> str:
    return ", ".join(f"{gid.index}: {gid.text} ({gid.kind})" for gid in gids) or "none"


def _indices(table: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(table) if name.isdecimal())
    except OSError:
        return []


def _text(path: str) -> str:
    """A row that is empty answers EINVAL, one that is gone ENOENT. Bare calls: some tables have 1,024 rows."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        return os.read(fd, _TEXT_BYTES_MAX).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)

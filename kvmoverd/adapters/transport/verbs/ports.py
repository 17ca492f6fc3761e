"""The RDMA ports of this machine: what each is and takes, read once when it is asked for."""

from __future__ import annotations

import contextlib
import enum
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvmoverd.adapters.transport.verbs.fabric import FabricError
from kvmoverd.adapters.transport.verbs.gids import INFINIBAND, ROCE_1, ROCE_2, Gid, read_table
from kvmoverd.adapters.transport.verbs.library import Library, load

log = logging.getLogger(__name__)

SYSFS = Path("/sys/class/infiniband")
_STATES = {0: "no state", 1: "down", 2: "init", 3: "armed", 4: "active", 5: "active, deferred"}
_ETHERNET = 2
_KINDS = {0: INFINIBAND, 1: ROCE_1, 2: ROCE_2}
"""`enum ibv_gid_type`."""
_EVENT_LINK = "anon_inode:[infinibandevent]"
_OPENING = threading.Lock()
"""Descriptors that pyverbs doesn't tell are found as those that came meanwhile, and a device brings one too: one thread
opens at a time.
"""
_Thing = TypeVar("_Thing")


class LinkLayer(enum.Enum):
    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"


@dataclass(frozen=True, slots=True)
class PortFacts:
    """One port. `*_max`: what its device takes of each; `netdev` "" and `numa_node` -1: not known."""

    device: str
    port: int
    state: str
    link_layer: LinkLayer
    lid: int
    mtu_bytes: int
    gids: tuple[Gid, ...]
    netdev: str
    numa_node: int
    region_bytes_max: int
    regions_max: int
    requests_max: int
    elements_max: int
    completions_max: int
    pairs_max: int
    vendor_id: int
    firmware: str

    @property
    def name(self) -> str:
        """As rdma tools print it."""
        return f"{self.device}:{self.port}"

    @property
    def is_active(self) -> bool:
        return self.state == _STATES[4]


def list_ports(*, sysfs: Path = SYSFS) -> list[PortFacts]:
    """All ports of all devices, by name; a device that fails takes no other along.

    Raises `TransportRefused` without pyverbs, `FabricError` where nothing but devices that fail was found.
    """
    library = load()
    found: list[PortFacts] = []
    refused: list[FabricError] = []
    for device in _devices(library, sysfs):
        try:
            found += _ports_of(library, device, sysfs)
        except FabricError as error:
            log.warning("an RDMA device is left out: %s", error)
            refused.append(error)
    if refused and not found:
        raise refused[0]
    return found


def _ports_of(library: Library, device: str, sysfs: Path) -> list[PortFacts]:
    """Raises `FabricError`."""
    context = open_context(library, device)
    try:
        count = context.query_device().phys_port_cnt
        return [facts_of(context, device, port, sysfs=sysfs) for port in range(1, count + 1)]
    except library.error as why:
        raise FabricError(f"{device} tells nothing of itself: {why}") from why
    finally:
        with contextlib.suppress(library.error):
            context.close()


def _devices(library: Library, sysfs: Path) -> list[str]:
    """A kernel without RDMA has none, and no list either. Raises `FabricError`, also for devices that only the kernel sees."""
    if not sysfs.is_dir():
        return []
    try:
        found = sorted(each.name.decode() for each in library.device.get_device_list())
    except library.error as why:
        raise FabricError(f"the RDMA devices can't be listed: {why}; is the module ib_uverbs loaded?") from why
    seen = sorted(path.name for path in sysfs.iterdir())
    if seen and not found:
        raise FabricError(
            f"the kernel has {', '.join(seen)}, no program can open them: there is no /dev/infiniband/uverbs* or no driver "
            f"of rdma-core; modprobe ib_uverbs, in a container --device=/dev/infiniband, apt-get install ibverbs-providers"
        )
    return found


def open_context(library: Library, device: str) -> Any:
    """The device. Raises `FabricError`."""
    try:
        with _OPENING:
            return library.device.Context(name=device)
    except library.error as why:
        raise FabricError(f"{device} can't be opened: {why}") from why


def with_event_fd(make: Callable[[], _Thing]) -> tuple[_Thing, int]:
    """What `make` makes, and the descriptor of events that it came with; -1: none, or more than one."""
    with _OPENING:
        before = _event_fds()
        made = make()
        new = _event_fds() - before
    told = getattr(made, "fd", None)
    if isinstance(told, int) and told in new:
        return made, told
    return made, new.pop() if len(new) == 1 else -1


def facts_of(context: Any, device: str, port: int, *, sysfs: Path = SYSFS) -> PortFacts:
    """As they are now. Raises `FabricError`."""
    try:
        attributes, told = context.query_device(), context.query_port(port)
    except load().error as why:
        raise FabricError(f"{device}:{port} tells nothing of itself: {why}") from why
    table = _gids(context, port, attributes.phys_port_cnt * told.gid_tbl_len)
    if not table:
        table = tuple(read_table(sysfs / device / "ports" / str(port)))
    return PortFacts(
        device=device,
        port=port,
        state=_STATES.get(told.state, f"state {told.state}"),
        link_layer=LinkLayer.ETHERNET if told.link_layer == _ETHERNET else LinkLayer.INFINIBAND,
        lid=told.lid,
        mtu_bytes=mtu_bytes(told.active_mtu),
        gids=table,
        netdev=_netdev(sysfs / device, table),
        numa_node=_numa_node(sysfs / device),
        region_bytes_max=attributes.max_mr_size,
        regions_max=attributes.max_mr,
        requests_max=attributes.max_qp_wr,
        elements_max=attributes.max_sge,
        completions_max=attributes.max_cqe,
        pairs_max=attributes.max_qp,
        vendor_id=attributes.vendor_id,
        firmware=attributes.fw_version,
    )


def place_of(device: str, *, sysfs: Path = SYSFS) -> int:
    """Differs when a device has gone and come back, under whatever name; 0 where there is none."""
    try:
        return (sysfs / device).stat().st_ino
    except OSError:
        return 0


def mtu_bytes(code: int) -> int:
    """Of `enum ibv_mtu`.

    >>> [mtu_bytes(code) for code in (1, 3, 5)]
    [256, 1024, 4096]
    """
    return 128 << code


def mtu_code(size_bytes: int) -> int:
    """The largest `enum ibv_mtu` within.

    >>> [mtu_code(size_bytes) for size_bytes in (256, 1500, 4096)]
    [1, 3, 5]
    """
    return size_bytes.bit_length() - 8


def _gids(context: Any, port: int, rows_max: int) -> tuple[Gid, ...]:
    """In one call of the kernel, where sysfs takes one a row; empty where this pyverbs or kernel can't."""
    query = getattr(context, "query_gid_table", None)
    if query is None:
        return ()
    try:
        rows = query(rows_max)
    except load().error:
        return ()
    found = []
    for row in rows:
        if row.port_num == port and row.gid_type in _KINDS:
            raw = bytes.fromhex(str(row.gid_str()).replace(":", ""))
            found.append(Gid(row.gid_index, raw, _KINDS[row.gid_type], _interface(row.ndev_ifindex)))
    return tuple(found)


def _interface(index: int) -> str:
    try:
        return socket.if_indextoname(index) if index else ""
    except OSError:
        return ""  # gone meanwhile


def _netdev(device: Path, table: Sequence[Gid]) -> str:
    """The GIDs' interface, else the one that hangs on the same PCI function."""
    for gid in table:
        if gid.netdev:
            return gid.netdev
    names = sorted(path.name for path in (device / "device" / "net").glob("*"))
    return names[0] if names else ""


def _numa_node(device: Path) -> int:
    try:
        return int((device / "device" / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _event_fds() -> set[int]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            if str(path.readlink()) == _EVENT_LINK:
                found.add(int(path.name))
        except OSError:
            continue  # closed meanwhile
    return found

"""The CNICs of a node, from [transport.verbs]: which ports are used, and which of them memory is near to."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvmoverd.adapters.sysfs import infiniband, process, topology
from kvmoverd.adapters.sysfs.tree import Tree, UnreadableError
from kvmoverd.adapters.transport.verbs import gids, library, posting
from kvmoverd.adapters.transport.verbs.device import PortFacts, Retries, VerbsFabric, list_ports, open_fabric
from kvmoverd.adapters.transport.verbs.fabric import FabricError
from kvmoverd.adapters.transport.verbs.memory import MemoryBook
from kvmoverd.adapters.transport.verbs.ports import LinkLayer
from kvmoverd.adapters.transport.verbs.transport import LinkFacts
from kvmoverd.config_transport import CNICS_MAX, VerbsConfig
from kvmoverd.core.errors import TransportRefused
from kvmoverd.core.qos import KvClass, Marks
from kvmoverd.ports.connection import CnicFacts, RdmaFacts
from kvmoverd.ports.memory import Memory, Near

log = logging.getLogger(__name__)

ROOT = Path("/")


class Cnics:
    """What was opened; whoever has it closes first the book, then the fabrics."""

    def __init__(self, fabrics: list[VerbsFabric], book: MemoryBook, root: Path = ROOT) -> None:
        self.fabrics = fabrics
        self.book = book
        self._tree = Tree(root)
        self._states = {fabric.name: "ACTIVE" for fabric in fabrics}

    def look(self) -> None:
        """Reads the state of the ports, and logs what changed. Blocks a little: some drivers ask their firmware."""
        try:
            now = {port.name: port.state for port in infiniband.ports(self._tree)}
        except UnreadableError as error:
            log.warning("the state of the CNICs can't be read: %s", error)
            now = {}
        for name, before in self._states.items():
            state = now.get(name, "")
            if state != before:
                log.warning("CNIC %s: its port is %s, it was %s", name, state or "not to be seen", before or "unknown")
            self._states[name] = state

    def facts(self, links: LinkFacts, marks: Mapping[KvClass, Marks]) -> RdmaFacts:
        cnics = [self._facts(fabric, users) for fabric, users in zip(self.fabrics, self.book.users(), strict=True)]
        counters = dataclasses.asdict(links)
        return RdmaFacts(
            library=library.load().words,
            posting=posting_text(),
            cnics=cnics,
            marks={kv_class.value: each.text for kv_class, each in marks.items()},
            registered_bytes=self.book.registered_bytes,
            queue_pairs=counters.pop("queue_pairs"),
            queue_pairs_max=counters.pop("queue_pairs_max"),
            counters=counters,
        )

    def _facts(self, fabric: VerbsFabric, regions: int) -> CnicFacts:
        facts, state = fabric.facts, self._states[fabric.name]
        layer = facts.link_layer.value
        return CnicFacts(fabric.name, state, layer, fabric.choice.words, facts.netdev, facts.numa_node, regions)


class CnicChoice:
    """`Choose` of the book: by hand, else by distance in PCIe, then by NUMA node, then by the number of regions.

    `cnics`: name and NUMA node of each; `root`: of the machine's filesystem.
    """

    def __init__(self, cnics: Sequence[tuple[str, int]], gpus: Mapping[str, str], root: Path = ROOT) -> None:
        """Raises `TransportRefused` when a GPU's CNIC is none of these."""
        self._cnics = list(cnics)
        self._root = root
        self._by_hand = {gpu: self._named(gpu, cnic) for gpu, cnic in gpus.items()}

    def __call__(self, near: Near, users: Sequence[int]) -> tuple[int, str]:
        by_hand = self._by_hand.get(near.gpu_pci_address or "")
        if by_hand is not None:
            return by_hand, f"{self._cnics[by_hand][0]}, by transport.verbs.gpus for GPU {near.gpu_pci_address}"
        known = [
            topology.Cnic(name, count, numa_node) for (name, numa_node), count in zip(self._cnics, users, strict=True)
        ]
        return topology.nearest_cnic(self._root, near.gpu_pci_address, near.numa_node, known)

    def _named(self, gpu: str, cnic: str) -> int:
        found = [index for index, (name, _) in enumerate(self._cnics) if _is_named(name, cnic)]
        if len(found) != 1:
            names = ", ".join(name for name, _ in self._cnics)
            what = "several of the CNICs" if found else "none of the CNICs"
            raise TransportRefused(f'transport.verbs.gpus."{gpu}" is "{cnic}", {what} in use: {names}')
        return found[0]


def chosen_ports(devices: Sequence[str], exclude: Sequence[str], ports: Sequence[PortFacts]) -> list[PortFacts]:
    """Those of `ports` that are asked for, in that order, or all that are up. Raises `TransportRefused` where there is none."""
    if devices:
        found = [port for name in devices for port in _asked_for(name, ports)]
        found = list(dict.fromkeys(found))
    else:
        found = [port for port in ports if port.is_active]
    found = [port for port in found if not any(_is_named(port.name, name) for name in exclude)]
    if not found:
        seen = ", ".join(_why_not(port, exclude) for port in ports) or "there is no RDMA device"
        raise TransportRefused(f'transport.kind = "verbs": no port can be used: {seen}; see kvmoverd doctor')
    if len(found) > CNICS_MAX:
        raise TransportRefused(
            f"{len(found)} ports are up, at most {CNICS_MAX} can be used: name transport.verbs.devices"
        )
    return found


def _why_not(port: PortFacts, exclude: Sequence[str]) -> str:
    names = [name for name in exclude if _is_named(port.name, name)]
    return f"{port.name} is left out by transport.verbs.exclude" if names else f"{port.name} is {port.state}"


def left_out(settings: VerbsConfig, chosen: Sequence[PortFacts], ports: Sequence[PortFacts]) -> list[str]:
    """The other ports with the reason, and names in `exclude` that are none: a slip there makes a CNIC of a storage NIC."""
    others = [port for port in ports if port not in chosen]
    unnamed = [port for port in others if port.is_active and settings.devices]
    found = [
        f"{port.name} is not in transport.verbs.devices" if port in unnamed else _why_not(port, settings.exclude)
        for port in others
    ]
    for name in settings.exclude:
        if not any(_is_named(port.name, name) for port in ports):
            found.append(f'no port is "{name}", as transport.verbs.exclude has it')
    return found


def ports_up() -> list[PortFacts]:
    """All that could be used on this machine. Raises `TransportRefused` where there is none."""
    return chosen_ports((), (), _all_ports())


def check_memlock(pool_bytes: int, root: Path = ROOT) -> None:
    """Can this process register so much? Raises `TransportRefused`."""
    tree = Tree(root)
    limits = process.limits(tree, "Max locked memory")
    if limits is None or limits[0] == process.UNLIMITED or process.has_capability(tree, "IPC_LOCK"):
        return
    if limits[0] < pool_bytes:
        raise TransportRefused(
            f'transport.kind = "verbs": {limits[0]} bytes of locked memory are allowed, the pool to be registered has '
            f"{pool_bytes}: set LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited`"
        )


def ports_here(settings: VerbsConfig) -> list[PortFacts]:
    """The ports that `open_cnics` would open. Raises `TransportRefused`."""
    found = chosen_ports(settings.devices, settings.exclude, _all_ports())
    CnicChoice([(port.name, port.numa_node) for port in found], settings.gpus)
    return found


def cnics_here(settings: VerbsConfig) -> dict[str, object]:
    """What `serve` would use on this machine, for `check`. Raises `TransportRefused` where it would refuse."""
    ports = ports_here(settings)
    return {
        "pyverbs": library.load().words,
        "posting": posting_text(),
        "cnic": [_told(settings, port) for port in ports],
        "left out": left_out(settings, ports, _all_ports()),
    }


def open_cnics(settings: VerbsConfig, pool: Memory, piece_bytes: int) -> Cnics:
    """Opens the ports and registers the pool; takes seconds for large ones. Raises `TransportRefused`; nothing is open then."""
    ports = ports_here(settings)
    retries = Retries(timeout=settings.timeout, retry=settings.retry)
    with ExitStack() as opened:
        try:
            fabrics = []
            for cnic, port in enumerate(ports):
                fabric = open_fabric(port.device, port.port, settings.gid_index, cnic=cnic, retries=retries)
                opened.callback(fabric.close)
                fabrics.append(fabric)
            choice = CnicChoice([(fabric.name, fabric.numa_node) for fabric in fabrics], settings.gpus)
            book = MemoryBook(fabrics, choice)
            opened.callback(book.close)
            book.add_pool(pool, piece_bytes)
            log.info("RDMA by %s; slices are posted: %s", library.load().words, posting_text())
            for fabric in fabrics:
                log.info("CNIC %s: %s, %s", fabric.name, fabric.facts.link_layer.value, fabric.choice.words)
        except FabricError as error:
            raise TransportRefused(f'transport.kind = "verbs": {error}') from error
        opened.pop_all()
    return Cnics(fabrics, book)


def posting_text() -> str:
    return "compiled" if posting.COMPILED else "by pyverbs, row after row: built without a compiler or libibverbs-dev"


def _all_ports() -> list[PortFacts]:
    try:
        return list_ports()
    except (FabricError, TransportRefused) as error:
        raise TransportRefused(f'transport.kind = "verbs": {error}') from error


def _asked_for(name: str, ports: Sequence[PortFacts]) -> list[PortFacts]:
    """Raises `TransportRefused`."""
    found = [port for port in ports if _is_named(port.name, name)]
    up = [port for port in found if port.is_active]
    if up:
        return up
    if found:
        states = ", ".join(f"{port.name} is {port.state}" for port in found)
        raise TransportRefused(f'transport.verbs.devices has "{name}": {states}; see kvmoverd doctor')
    seen = ", ".join(port.name for port in ports) or "none"
    raise TransportRefused(f'transport.verbs.devices has "{name}": there is no such port; there are: {seen}')


def _is_named(port: str, name: str) -> bool:
    """A device's name stands for all of its ports."""
    return name in (port, port.partition(":")[0])


def _told(settings: VerbsConfig, port: PortFacts) -> dict[str, object]:
    infiniband = port.link_layer is LinkLayer.INFINIBAND
    gid = gids.choose(port.gids, port=port.name, infiniband=infiniband, wanted=settings.gid_index)
    return {
        "name": port.name,
        "link layer": port.link_layer.value,
        "mtu": port.mtu_bytes,
        "gid": gid.words,
        "netdev": port.netdev or "none",
        "numa node": port.numa_node if port.numa_node >= 0 else "not known",
    }

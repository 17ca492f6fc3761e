"""Checks of RDMA devices: what is there, in which state, with which library and which way to post."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from kvmoverd.adapters.doctor.finding import Finding, Findings, Look, fail, fail_if, ok, skip, warn
from kvmoverd.adapters.storage.inspect.text import amount_text
from kvmoverd.adapters.sysfs import infiniband, net, pci
from kvmoverd.adapters.sysfs.infiniband import ETHERNET, Port
from kvmoverd.adapters.sysfs.tree import Tree
from kvmoverd.adapters.transport.verbs.fabric import FabricError
from kvmoverd.adapters.transport.verbs.gids import ROCE_2, Rank, choose, rank, read_table
from kvmoverd.core.errors import TransportRefused

NO_DEVICE = 'no RDMA device: only transport.kind = "verbs" needs one'
_LIBRARY_HOMES = ("/usr/lib64", "/lib64", "/usr/local/lib", "/usr/lib", "/lib")
_VERSION = re.compile(r"libibverbs\.so\.1\.\d+\.(.+)")


def used_ports(look: Look) -> list[Port]:
    """Active, and not left out by the config: the CNICs that a daemon would take, in its order. Raises `UnreadableError`."""
    found = [port for port in infiniband.ports(look.tree) if port.is_active]
    taken = [port for port in found if look.wanted.takes(port.device, port.number)]
    named = [port for name in look.wanted.devices for port in taken if name in (port.device, port.name)]
    return list(dict.fromkeys(named)) if look.wanted.devices else taken


def check_ports(look: Look) -> Findings:
    tree, wanted = look.tree, look.wanted
    ports = infiniband.ports(tree)
    for address in pci.without_rdma(tree):
        remedy = (
            "load its RDMA driver: modprobe mlx5_ib; in a container, run it with the host's /sys and --network host"
        )
        yield fail_if(wanted.verbs, f"the network card at {address} has no RDMA device", remedy)
    if not ports:
        remedy = 'install the card\'s driver, see `rdma link`; or set transport.kind = "tcp"'
        yield fail("no RDMA device, and the config asks for verbs", remedy) if wanted.verbs else skip(NO_DEVICE)
        return
    for port in ports:
        yield _port(look, port)
    known = {name for port in ports for name in (port.device, port.name)}
    for name in sorted(set(wanted.devices) - known):
        yield fail(
            f"transport.verbs.devices names {name}, which is not here", f"name one of {', '.join(sorted(known))}"
        )
    if not used_ports(look):
        found = f"none of {len(ports)} ports can be used: down, or left out by the config"
        yield fail_if(wanted.verbs, found, "see to the cables, the subnet manager and `rdma link`")
    yield from _device_files(tree)


def _port(look: Look, port: Port) -> Finding:
    tree = look.tree
    path = infiniband.device_path(tree, port.device)
    words = [port.state or "state unknown", port.physical, port.link_layer, port.rate]
    words += [f"lid {port.lid}"] if port.link_layer != ETHERNET else [f"netdev {port.netdev or 'unknown'}"]
    words += [f"firmware {text}"] if (text := infiniband.firmware(tree, port.device)) else []
    words += ["virtual device"] if path is None else [f"PCI {path.address}, NUMA node {path.numa_node}"]
    found = f"{port.name}: {', '.join(word for word in words if word)}"
    if not look.wanted.takes(port.device, port.number):
        return skip(f"{found}; left out by the config")
    if not port.is_active:
        remedy = _down_remedy(port)
        named = port.device in look.wanted.devices or port.name in look.wanted.devices
        return fail(found, remedy) if named else skip(f"{found}; not used while it is down", remedy)
    if path is not None and (slow := pci.narrowed(tree, path.address)):
        return warn(f"{found}; PCIe {slow}", "reseat the card, or give it a slot with all lanes; see lspci -vv, LnkSta")
    return _with_mtu(tree, port, found) if port.link_layer == ETHERNET else ok(found)


def _down_remedy(port: Port) -> str:
    if port.link_layer == ETHERNET:
        return f"ip link set dev {port.netdev or 'its interface'} up, then see to the cable and the switch"
    return "start a subnet manager (opensm)" if port.physical == "LinkUp" else "see to the cable and the switch"


def _with_mtu(tree: Tree, port: Port, found: str) -> Finding:
    if not port.netdev:
        return warn(
            f"{found}; no network interface known", "see `rdma link show`: without one there is no routable GID"
        )
    mtu_bytes = net.mtu_bytes(tree, port.netdev) or 0
    packet_bytes = net.roce_mtu_bytes(mtu_bytes)
    found = f"{found}, mtu {mtu_bytes}: RDMA packets of {packet_bytes} bytes"
    if not net.is_up(tree, port.netdev):
        return fail(f"{found}; {port.netdev} is down", f"ip link set dev {port.netdev} up")
    if packet_bytes < 4096:
        return warn(
            found, f"ip link set dev {port.netdev} mtu {net.ROCE_MTU_BYTES}, or 9000, and the same on every switch"
        )
    return ok(found)


def _device_files(tree: Tree) -> Iterator[Finding]:
    """Verbs go through a character device each; a container may not have been given them."""
    home = "/dev/infiniband"
    names = [name for name in tree.names(home) if name.startswith("uverbs")]
    if not names:
        yield fail(f"no {home}/uverbs*", "modprobe ib_uverbs; in a container: --device=/dev/infiniband")
    shut = [name for name in names if not os.access(tree.at(f"{home}/{name}"), os.R_OK | os.W_OK)]
    if shut:
        yield fail(
            f"{home}/{shut[0]} may not be opened by this user", "give this user's group read and write, by a udev rule"
        )


def check_gids(look: Look) -> Findings:
    """The address that a queue pair of each port would have, and why that one."""
    ports = used_ports(look)
    if not ports:
        yield skip(NO_DEVICE if not infiniband.devices(look.tree) else "no port in use")
    for port in ports:
        yield _gid(look, port)


def _gid(look: Look, port: Port) -> Finding:
    table = read_table(look.tree.at(port.directory))
    is_infiniband = port.link_layer != ETHERNET
    remedy = (
        f"give {port.netdev or 'its interface'} an address that other nodes reach, or set transport.verbs.gid_index"
    )
    try:
        choice = choose(table, port=port.name, infiniband=is_infiniband, wanted=look.wanted.gid_index)
    except TransportRefused as error:
        return fail_if(look.wanted.verbs, str(error), remedy)
    found = f"{port.name}: {choice.words}"
    if is_infiniband:
        return ok(found)
    if choice.gid.kind != ROCE_2:
        by_hand = (
            "set transport.verbs.gid_index to a row of RoCE v2, or to -1: `show_gids`, or gid_attrs/types in sysfs"
        )
        v2 = "KV needs RoCE v2: a newer driver, or card; those of ConnectX-3 Pro and later have rows of both kinds"
        return warn(
            f"{found}: not routed, and without a traffic class, so without a lane",
            by_hand if any(gid.kind == ROCE_2 for gid in table) else v2,
        )
    return warn(found, remedy) if rank(choice.gid) >= Rank.OVERLAY else ok(found)


def check_library(look: Look) -> Findings:
    """pyverbs is looked for even where no device is: to say what is missing before one comes. Opens every device."""
    from kvmoverd.adapters.transport.verbs.library import load  # noqa: PLC0415 - only this check needs it
    from kvmoverd.adapters.transport.verbs.ports import list_ports  # noqa: PLC0415

    core, has_devices = _rdma_core(look.tree), bool(infiniband.devices(look.tree))
    try:
        yield ok(f"{load().words}; {core}")
    except TransportRefused as error:
        remedy = "apt-get install python3-pyverbs ibverbs-providers"
        found = f"{error}; {core}"
        yield fail_if(look.wanted.verbs, found, remedy) if look.wanted.verbs or has_devices else skip(found, remedy)
        return
    if not has_devices:
        return
    try:
        opened = [facts for facts in list_ports() if look.wanted.takes(facts.device, facts.port)]
    except FabricError as error:
        yield fail_if(look.wanted.verbs, str(error), "see dmesg, and who may open /dev/infiniband/uverbs*")
        return
    for facts in opened:
        yield ok(
            f"{facts.name} opens: active MTU {facts.mtu_bytes}, {facts.pairs_max} queue pairs of {facts.requests_max} requests, "
            f"{facts.regions_max} registrations of {amount_text(facts.region_bytes_max)} at most"
        )


def _rdma_core(tree: Tree) -> str:
    """Its version is the end of libibverbs' real name: libibverbs.so.1.14.44.0 comes with rdma-core 44.0."""
    homes = [
        f"{home}/{name}" for home in ("/usr/lib", "/lib") for name in tree.names(home) if name.endswith("-linux-gnu")
    ]
    for home in (*homes, *_LIBRARY_HOMES):
        real = tree.real(f"{home}/libibverbs.so.1")
        if real is not None and (match := _VERSION.search(real)):
            return f"rdma-core {match[1]}"
    return "no libibverbs on this machine"


def check_posting(look: Look) -> Findings:
    try:
        from kvmoverd.adapters.transport.verbs import _post  # noqa: F401, PLC0415 - to see whether it loads
    except ImportError as error:
        found = f"slices are posted by pyverbs, one object each: the compiled helper does not load ({error})"
        remedy = "install gcc, Python's headers and libibverbs-dev, then this package anew"
        needs_it = look.wanted.verbs or bool(infiniband.devices(look.tree))
        yield warn(found, remedy) if needs_it else skip(found, remedy)
        return
    yield ok("slices are posted by the compiled helper")

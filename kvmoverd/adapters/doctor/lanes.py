"""Checks that the low-priority lane acts: nothing overrides our marks, and somebody looks at them."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator

from kvmoverd.adapters.doctor import netlink
from kvmoverd.adapters.doctor.finding import Finding, Findings, Look, fail, fail_if, ok, skip, warn
from kvmoverd.adapters.doctor.rdma import used_ports
from kvmoverd.adapters.sysfs import net
from kvmoverd.adapters.sysfs.infiniband import ETHERNET, Port
from kvmoverd.adapters.sysfs.tree import Tree, UnreadableError
from kvmoverd.adapters.transport.lane import Lane, set_lane

FABRIC = "docs/fabric.md"
_SMPQUERY_S = 1.0
_MODEL_SERVICE_LEVEL = 0
"""What NCCL and most others use when nobody says."""
_WITH_BANDS = {"prio", "ets", "htb", "mqprio", "taprio", "pfifo_fast", "hfsc", "cbq", "dualpi2", "skbprio"}
_JUMBO_BYTES = 4000
"""From here on the cost of a packet is small beside that of its bytes."""
_ONLY_HOLDERS = {"mq", "clsact", "ingress"}


def check_override(look: Look) -> Findings:
    """Settings of a whole device that replace what a queue pair asks for."""
    ports = [port for port in used_ports(look) if port.link_layer == ETHERNET]
    if not ports:
        yield skip("no RoCE port in use")
        return
    ours = {marks.traffic_class for marks in look.wanted.marks.values()}
    for port in ports:
        yield _override(look.tree, port, ours)


def _override(tree: Tree, port: Port, ours: set[int]) -> Finding:
    words = " and ".join(str(number) for number in sorted(ours))
    path = f"/sys/class/infiniband/{port.device}/tc/{port.number}/traffic_class"
    for line in tree.lines(path):
        forced = re.search(r"tclass=(\d+)", line)
        if forced and {int(forced[1]) >> 2} != {number >> 2 for number in ours}:
            return _forced(f"{port.name}: traffic class {forced[1]} is forced on", words, path, line)
    path = f"/sys/kernel/config/rdma_cm/{port.device}/ports/{port.number}/default_roce_tos"
    default = tree.number(path)
    if default:
        return warn(
            f"{port.name}: rdma_cm gives connections traffic class {default} unless they ask for another; kvmoverd makes "
            f"its own with {words}, and is not touched",
            f"nothing, if that is model traffic's class; else echo 0 > {path}, or cma_roce_tos",
        )
    return ok(f"{port.name}: nothing forces a traffic class, ours is {words}")


def _forced(found: str, ours: str, path: str, line: str) -> Finding:
    """`line`: of the driver's table, "Global tclass=106" or a rule for addresses, "dst_ip=10.0.0.0/8,tclass=106"."""
    if line.startswith("Global"):
        return fail(
            f"{found} every queue pair of the device, ours is {ours}: KV travels in the same lane as all else",
            f"echo -1 > {path} (MLNX_OFED), and let each application set its own",
        )
    rule = re.sub(r"tclass=\d+", "tclass=-1", line.strip())
    return fail(
        f"{found} queue pairs by the rule {line.strip()}, ours is {ours}: KV to those nodes leaves its lane",
        f"echo {rule} > {path} (MLNX_OFED), and let each application set its own",
    )


def check_sl2vl(look: Look) -> Findings:
    """Does KV's service level end in a virtual lane of its own?"""
    ports = [port for port in used_ports(look) if port.link_layer != ETHERNET]
    if not ports:
        yield skip("no InfiniBand port in use")
    for port in ports:
        yield _lanes_of(look, port)


def _lanes_of(look: Look, port: Port) -> Finding:
    table = _sl2vl(look.tree, port)
    if isinstance(table, str):
        return skip(f"{port.name}: {table}", f"as root: {' '.join(_ask_sl2vl(port))}")
    levels = sorted({marks.service_level for marks in look.wanted.marks.values()})
    lanes = {level: table[level] for level in levels if level < len(table)}
    model = table[_MODEL_SERVICE_LEVEL]
    words = ", ".join(f"SL {level} -> VL {lane}" for level, lane in lanes.items())
    if any(lane == model for lane in lanes.values()):
        remedy = f"give KV's service level a lane of its own: {FABRIC}, config/fabric/opensm"
        return fail_if(
            look.wanted.verbs, f"{port.name}: {words}, and SL 0 -> VL {model} too: no lane of its own", remedy
        )
    return ok(f"{port.name}: {words}; SL 0 -> VL {model}")


def _sl2vl(tree: Tree, port: Port) -> list[int] | str:
    """Lane by service level, from the driver's own file or from the port itself; or why it can't be known."""
    home = f"{port.directory}/sl2vl"
    rows = [tree.number(f"{home}/{level}") for level in tree.names(home)]
    if rows and None not in rows:
        return [row for row in rows if row is not None]
    if shutil.which("smpquery") is None:
        return "the driver does not show its table, and smpquery (infiniband-diags) is not installed"
    try:
        done = subprocess.run(_ask_sl2vl(port), capture_output=True, text=True, timeout=_SMPQUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"smpquery says nothing: {error}"
    return parse_sl2vl(done.stdout) or f"smpquery can't ask the port: {(done.stderr or done.stdout).strip()[:120]}"


def _ask_sl2vl(port: Port) -> list[str]:
    """Of the port itself: a way of no hops. Options come first, as nothing else is sure to take them."""
    return ["smpquery", "-C", port.device, "-P", str(port.number), "-D", "sl2vl", "0"]


def parse_sl2vl(text: str) -> list[int]:
    """Of what smpquery prints; empty where there is no table.

    >>> parse_sl2vl("#  SL: | 0| 1| 2|\\nports: in  0, out  0: | 0| 1| 2|")
    [0, 1, 2]
    """
    for line in text.splitlines():
        if line.startswith("ports:"):
            return [int(cell) for cell in line.partition("|")[2].split("|") if cell.strip().isdecimal()]
    return []


def check_tcp_lane(look: Look) -> Findings:
    """Tries both on sockets that are never connected."""
    if not look.wanted.tcp:
        yield skip(f'transport.kind is "{look.wanted.transport}"')
        return
    lane = Lane(look.wanted.dscp, look.wanted.so_priority)
    expected = f"DSCP {lane.dscp}, SO_PRIORITY {lane.so_priority}"
    for name, family in (("IPv4", socket.AF_INET), ("IPv6", socket.AF_INET6)):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                said = set_lane(sock, lane)
        except OSError as error:
            yield skip(f"no {name} sockets here: {os.strerror(error.errno or 0)}")
            continue
        yield (
            ok(f"{name}: {said}")
            if said == expected
            else warn(
                f"{name}: {said}", "a container's runtime or a BPF program forbids it: allow IP_TOS and SO_PRIORITY"
            )
        )


def check_qdisc(look: Look) -> Findings:
    """Do the interfaces of the data channels queue by priority?"""
    if not look.wanted.tcp:
        yield skip(f'transport.kind is "{look.wanted.transport}"')
        return
    by_interface: dict[str, set[str]] = {name: set() for name in data_interfaces(look)}
    for row in netlink.qdiscs():
        if row.interface in by_interface:
            by_interface[row.interface].add(row.kind)
    if not by_interface:
        yield skip("no interface is up that other nodes could reach")
    for name, kinds in by_interface.items():
        yield _qdisc(name, kinds)


def _qdisc(name: str, kinds: set[str]) -> Finding:
    words = ", ".join(sorted(kinds)) or "none"
    if name == "lo":
        return ok("lo: nothing leaves this machine")
    if kinds & _WITH_BANDS:
        return ok(f"{name}: {words}; `tc filter show dev {name}` says which DSCP goes where")
    if kinds <= _ONLY_HOLDERS | {"noqueue"}:
        found = f"{name}: queueing discipline {words}: packets are not queued here, so none can yield"
    else:
        found = f"{name}: queueing discipline {words}: shares fairly, KV does not yield to other traffic of this host"
    return warn(found, f"where other traffic shares this interface: config/fabric/tcp/tc.sh, see {FABRIC}")


def data_interfaces(look: Look) -> list[str]:
    """Those of the hosts that data channels listen on; of "every interface" all that are up and have an address."""
    at = {row.address: row.interface for row in netlink.addresses()}
    found = [at[host] for host in look.wanted.listen_hosts if host in at]
    if not found:
        names = net.interfaces(look.tree)
        up = {name for name in names if net.is_up(look.tree, name) and not net.is_within(look.tree, name)}
        found = [name for name in at.values() if name in up]
    return list(dict.fromkeys(found))


def check_tcp_mtu(look: Look) -> Findings:
    if not look.wanted.tcp:
        yield skip(f'transport.kind is "{look.wanted.transport}"')
        return
    names = data_interfaces(look)
    if not names:
        yield skip("no interface is up that other nodes could reach")
    for name in names:
        yield from _tcp_mtu(look.tree, name)


def _tcp_mtu(tree: Tree, name: str) -> Iterator[Finding]:
    mtu_bytes = net.mtu_bytes(tree, name)
    if mtu_bytes is None:
        raise UnreadableError(f"{name} has no mtu")
    if mtu_bytes >= _JUMBO_BYTES or name == "lo":
        yield ok(f"{name}: mtu {mtu_bytes}")
    else:
        remedy = f"in a network with jumbo frames: ip link set dev {name} mtu 9000; one core moves more bytes then"
        yield warn(f"{name}: mtu {mtu_bytes}", remedy)

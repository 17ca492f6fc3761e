"""Does KV between nodes share its interface with the storage? Then the two readings of one request wait for each other."""

from __future__ import annotations

import re
import socket

from kvmoverd.adapters.doctor import netlink
from kvmoverd.adapters.doctor.finding import Findings, Look, ok, skip, warn
from kvmoverd.adapters.doctor.lanes import data_interfaces
from kvmoverd.adapters.doctor.rdma import used_ports
from kvmoverd.adapters.sysfs.tree import Tree

_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph")
_SERVER = re.compile(r"\baddr=([0-9a-fA-F.:]+)")
_ANY_PORT = 9
_MOUNT_WORDS_MIN = 5
"""Of a line of mountinfo before its hyphen."""


def check_storage_nic(look: Look) -> Findings:
    wanted, ports = look.wanted, used_ports(look)
    if not wanted.transport:
        yield skip("without --config it is not known where the storage is")
        return
    ours = {port.netdev for port in ports if port.netdev} if wanted.verbs else set(data_interfaces(look))
    servers = {path: server for path in wanted.storage_paths if (server := storage_server(look.tree, path))}
    interfaces = {path: interface_to(server) for path, server in servers.items()}
    shared = [(path, name) for path, name in interfaces.items() if name in ours]
    for path, name in shared:
        remedy = (
            f"transport.verbs.exclude takes the device of {name}"
            if wanted.verbs
            else "listen on another interface, if there is one"
        )
        yield warn(f"{path} is reached by {name}, and so is KV of other nodes", remedy)
    if shared:
        return
    if wanted.verbs and len(ports) > 1 and not (wanted.devices or wanted.exclude):
        found = f"all {len(ports)} active ports are CNICs: no device is chosen, none left out"
        yield warn(found, "if one of them is the storage's: name it in transport.verbs.exclude")
    elif servers:
        told = ", ".join(f"{path} by {name or 'an unknown interface'}" for path, name in interfaces.items())
        yield ok(f"{told}; KV by {', '.join(sorted(ours)) or 'none'}")
    else:
        yield ok("no storage root is seen to come over a network interface of ours")


def storage_server(tree: Tree, path: str) -> str:
    """Address of the server behind a path's mount; empty where it is none that tells. Raises `UnreadableError`."""
    best, found = "", ""
    for line in tree.lines("/proc/self/mountinfo"):
        left, right = (part.split() for part in line.partition(" - ")[::2])
        if len(left) < _MOUNT_WORDS_MIN or not right:
            continue
        point, kind, options = left[4], right[0], right[-1]
        inside = path == point or path.startswith(f"{point.rstrip('/')}/")
        if inside and len(point) >= len(best):
            best, match = point, _SERVER.search(options)
            found = match[1] if match and kind in _NETWORK_FILESYSTEMS else ""
    return found


def interface_to(server: str) -> str:
    """By the routing table: a datagram socket is connected, nothing is sent. Empty where there is no route."""
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((server, _ANY_PORT))
            own = sock.getsockname()[0]
    except OSError:
        return ""
    return next((row.interface for row in netlink.addresses() if row.address == own), "")

"""Machines on paper: trees of /sys and /proc below a directory, in the shape of the real ones."""

from __future__ import annotations

import os
from pathlib import Path

from kvmoverd.adapters.sysfs.tree import Tree


class Machine:
    """Writes what a test says; nothing is there that was not said."""

    def __init__(self, root: Path) -> None:
        self.root, self.tree = root, Tree(root)

    def write(self, path: str, content: object) -> None:
        at = self.tree.at(path)
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())

    def link(self, path: str, target: str) -> None:
        """Relative, as sysfs has them, so that it stays below the root."""
        at = self.tree.at(path)
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(os.path.relpath(self.tree.at(target), at.parent))

    def nodes(self, *distances: str) -> None:
        for node, line in enumerate(distances):
            self.write(f"/sys/devices/system/node/node{node}/distance", line)

    def pci(self, way: str, *, numa: int = -1, vendor: str = "0x8086", kind: str = "0x060400") -> str:
        """A device and the bridges before it: "pci0000:00/00:01.0/01:00.0"; returns its directory."""
        host_bridge, *short = way.split("/")
        domain = host_bridge.removeprefix("pci").partition(":")[0]
        directory = f"/sys/devices/{host_bridge}"
        for at, address in enumerate(short):
            full = f"{domain}:{address}"
            directory = f"{directory}/{full}"
            if not self.tree.exists(directory):
                last = at == len(short) - 1
                self.write(f"{directory}/numa_node", numa)
                self.write(f"{directory}/vendor", vendor if last else "0x1000")
                self.write(f"{directory}/class", kind if last else "0x060400")
                self.link(f"/sys/bus/pci/devices/{full}", directory)
        return directory

    def gpu(self, way: str, *, numa: int = -1) -> str:
        return self.pci(way, numa=numa, vendor="0x10de", kind="0x030200")

    def cnic(
        self,
        device: str,
        way: str = "",
        *,
        numa: int = -1,
        netdev: str = "",
        state: str = "4: ACTIVE",
        gids: tuple[tuple[str, str], ...] = (),
        rate: str = "400 Gb/sec (4X NDR)",
    ) -> None:
        """One port; with `netdev` on Ethernet. Without `way` it is virtual. `gids`: each with its type."""
        home = f"/sys/class/infiniband/{device}"
        real = f"{self.pci(way, numa=numa, vendor='0x15b3', kind='0x020700')}" if way else "/sys/devices/virtual"
        self.write(f"{real}/infiniband/{device}/fw_ver", "28.39.1002")
        self.link(home, f"{real}/infiniband/{device}")
        if way:
            self.link(f"{real}/infiniband/{device}/device", real)
        elif netdev:
            self.write(f"{home}/parent", netdev)
        port = f"{home}/ports/1"
        self.write(f"{port}/state", state)
        self.write(f"{port}/phys_state", "5: LinkUp" if "ACTIVE" in state else "3: Disabled")
        self.write(f"{port}/rate", rate)
        self.write(f"{port}/link_layer", "Ethernet" if netdev else "InfiniBand")
        self.write(f"{port}/lid", "0x0" if netdev else "0x1f")
        for index, (gid, kind) in enumerate(gids):
            self.write(f"{port}/gids/{index}", gid)
            self.write(f"{port}/gid_attrs/types/{index}", kind)
            if netdev:
                self.write(f"{port}/gid_attrs/ndevs/{index}", netdev)
        if netdev:
            self.netdev(netdev, mtu=4200)
        if netdev and way:
            self.write(f"{real}/net/{netdev}/ifindex", 2)

    def netdev(self, name: str, *, mtu: int, state: str = "up") -> None:
        self.write(f"/sys/class/net/{name}/mtu", mtu)
        self.write(f"/sys/class/net/{name}/operstate", state)


def eight_pairs(machine: Machine) -> None:
    """A box of two sockets: 8 switches, each with a GPU, its CNIC behind the same switch, four to a socket."""
    machine.nodes("10 21", "21 10")
    for at in range(8):
        bus = 0x10 + 0x10 * at
        switch = f"pci0000:{bus:02x}/{bus:02x}:01.0/{bus + 1:02x}:00.0"
        machine.gpu(f"{switch}/{bus + 2:02x}:00.0/{bus + 3:02x}:00.0", numa=at // 4)
        machine.cnic(f"mlx5_{at}", f"{switch}/{bus + 2:02x}:01.0/{bus + 4:02x}:00.0", numa=at // 4)

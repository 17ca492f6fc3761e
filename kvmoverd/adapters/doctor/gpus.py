"""Checks of the way between GPUs and CNICs: PCIe, what redirects it, and what lets a CNIC see GPU memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvmoverd.adapters.doctor.finding import Finding, Findings, Look, fail, ok, skip, warn
from kvmoverd.adapters.doctor.rdma import NO_DEVICE, used_ports
from kvmoverd.adapters.sysfs import pci
from kvmoverd.adapters.sysfs.infiniband import Port, device_path
from kvmoverd.adapters.sysfs.pci import PciPath
from kvmoverd.adapters.sysfs.topology import Cnic, Distance, between, distance, nearest_cnic, nodes_count

_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "amdp2p", "ib_peer_mem")
_DMABUF_FROM = (5, 12)
_ACS_REMEDY = (
    "as root: setpci -s ADDRESS ECAP_ACS+0x6.w=0000 for each, after every boot; or switch ACS off in the firmware. A virtual "
    "machine needs it: there give the card ATS instead"
)


def check_paths(look: Look) -> Findings:
    """Which CNIC each GPU gets, and what lies between."""
    gpus, ports = pci.gpus(look.tree), used_ports(look)
    if not gpus or not ports:
        yield skip("no GPU on the PCI bus" if not gpus else NO_DEVICE)
        return
    users = [0] * len(ports)
    nodes = nodes_count(look.tree)
    for gpu in gpus:
        by_hand = look.wanted.gpus.get(gpu.address, "")
        chosen = [at for at, port in enumerate(ports) if by_hand in (port.device, port.name)]
        if by_hand and len(chosen) != 1:
            what = f"{len(chosen)} of the CNICs in use" if chosen else "none of the CNICs in use"
            names = ", ".join(port.name for port in ports)
            yield fail(f"transport.verbs.gpus gives GPU {gpu.address} to {by_hand}, {what}", f"name one of {names}")
            continue
        cnics = [Cnic(port.name, count) for port, count in zip(ports, users, strict=True)]
        index, why = (
            (chosen[0], f"{by_hand}, by the config")
            if chosen
            else nearest_cnic(look.tree.root, gpu.address, None, cnics)
        )
        users[index] += 1
        yield _way(look, gpu, ports[index], why, nodes)


def _way(look: Look, gpu: PciPath, port: Port, why: str, nodes: int) -> Finding:
    path = device_path(look.tree, port.device)
    if path is None:
        return skip(f"GPU {gpu.address}: {why}; {port.name} is a virtual device, on no PCIe bus")
    kind = distance(gpu, path, nodes=nodes)
    found = why if gpu.address in why else f"{why}, {kind.name} to GPU {gpu.address}"
    if kind <= Distance.PXB:
        return ok(found)
    remedy = (
        "put a CNIC into a slot behind the GPU's own PCIe switch; `nvidia-smi topo -m` shows which, and transport.verbs.gpus "
        "takes a choice by hand"
    )
    return warn(
        f"{found}: traffic to this GPU crosses the CPU{', and the other socket' if kind is Distance.SYS else ''}",
        remedy,
    )


def check_acs(look: Look) -> Findings:
    """Bridges between a GPU and its CNIC that send everything up to the CPU first."""
    bridges = _bridges_between(look)
    if not bridges:
        yield skip("no GPU and CNIC behind one PCIe switch")
        return
    states = {address: pci.redirects(look.tree, address) for address in bridges}
    on = [address for address, state in states.items() if state]
    hidden = [address for address, state in states.items() if state is None]
    if on:
        yield warn(f"ACS redirects peer traffic to the CPU at {', '.join(on)}", _ACS_REMEDY)
    if hidden:
        yield skip(f"the registers of {', '.join(hidden)} can't be read", "run doctor as root to see whether ACS is on")
    if not on and not hidden:
        yield ok(f"ACS redirects nothing at the {len(states)} bridges between GPUs and CNICs")


def _bridges_between(look: Look) -> list[str]:
    found: list[str] = []
    paths = [path for port in used_ports(look) if (path := device_path(look.tree, port.device))]
    for gpu in pci.gpus(look.tree):
        for path in paths:
            if distance(gpu, path) <= Distance.PXB:
                found += between(gpu, path)
    return list(dict.fromkeys(found))


def check_iommu(look: Look) -> Findings:
    devices = [path for port in used_ports(look) if (path := device_path(look.tree, port.device))]
    devices += pci.gpus(look.tree)
    if not devices:
        yield skip("neither CNIC nor GPU on the PCI bus")
        return
    kinds = {path.address: pci.iommu_type(look.tree, path.address) for path in devices}
    translated = [address for address, kind in kinds.items() if kind.startswith("DMA")]
    if translated:
        found = f"the IOMMU translates for {', '.join(translated)}: registering memory is slow, peer traffic goes by the CPU"
        yield warn(found, "boot with the kernel's parameter iommu=pt")
    else:
        yield ok(
            f"no translation for {len(kinds)} devices ({', '.join(sorted(set(kinds.values()) - {''})) or 'no IOMMU'})"
        )


def check_gpu_memory(look: Look) -> Findings:
    """What lets a CNIC write into GPU memory: dmabuf, or a module of peer memory."""
    gpus = pci.gpus(look.tree)
    if not gpus:
        yield skip("no GPU on the PCI bus")
        return
    modules = [name for name in _PEER_MODULES if look.tree.exists(f"/sys/module/{name}")]
    words = [f"{name} is loaded" for name in modules]
    words += list(_dmabuf(look))
    found = f"{len(gpus)} GPUs; {'; '.join(words)}"
    if modules or any(word.startswith("dmabuf can") for word in words):
        yield ok(found)
    else:
        remedy = (
            "modprobe nvidia_peermem; or a kernel from 5.12 on with NVIDIA's open kernel modules (driver 515 and later)"
        )
        yield warn(f"{found}; the CNIC can't reach GPU memory, copies go by the GPU's copy engine", remedy)


def _dmabuf(look: Look) -> Iterator[str]:
    release = kernel_release(look)
    if release < _DMABUF_FROM:
        yield f"no dmabuf for RDMA: kernel {'.'.join(map(str, release))}, 5.12 is needed"
        return
    driver = look.tree.text("/proc/driver/nvidia/version") or ""
    version = re.search(r"\b(\d{3})\.\d+", driver)
    if "Open Kernel Module" in driver:
        yield f"dmabuf can be had from NVIDIA's open kernel modules {version[0] if version else ''}".rstrip()
    elif driver:
        yield f"no dmabuf from NVIDIA's closed kernel modules {version[0] if version else ''}".rstrip()
    elif look.tree.exists("/sys/module/amdgpu"):
        yield "dmabuf can be had from amdgpu"
    else:
        yield "the GPU's driver is not loaded"


def kernel_release(look: Look) -> tuple[int, int]:
    """(0, 0) where it can't be read."""
    match = re.match(r"(\d+)\.(\d+)", look.tree.text("/proc/sys/kernel/osrelease") or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)

"""Checks of the kernel, its memory, and what this package was built with."""

from __future__ import annotations

import shutil

from kvmoverd.adapters.doctor.finding import Finding, Findings, Look, fail, fail_if, ok, skip, warn
from kvmoverd.adapters.doctor.gpus import kernel_release
from kvmoverd.adapters.storage.inspect.text import amount_text
from kvmoverd.adapters.storage.uring_probe import PROBE_S, uring_refusal
from kvmoverd.adapters.sysfs import process

URING_S = PROBE_S + 10.0
_HUGE_BYTES = 2 << 20
_HUGE = "/sys/kernel/mm/hugepages/hugepages-2048kB"
_TRANSPARENT = "/sys/kernel/mm/transparent_hugepage"
_SHM_BYTES_MIN = 1 << 30
_URING_REMEDY = (
    "threads read instead, slower. pip install 'kvmoverd[uring]'; sysctl kernel.io_uring_disabled=0; a container's "
    "seccomp profile must allow io_uring_setup, io_uring_enter and io_uring_register"
)
_URING_SIGNS = {
    "Illegal instruction": "threads read instead: this processor lacks instructions that liburing's package was built for",
    "not done within": "threads read instead; once the machine is less busy start the daemon, and doctor, again",
}
"""What can be done, by the words of the trial that failed."""
_SLOW_CLOCKS = {"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"}
_KERNEL_FROM = (5, 14)


def check_kernel(look: Look) -> Findings:
    text = look.tree.text("/proc/sys/kernel/osrelease")
    if text is None:
        yield skip("the kernel's release can't be read")
    elif kernel_release(look) < _KERNEL_FROM:
        found = f"Linux {text}: before 5.14 the pool is filled by hand at the start, which takes longer; no dmabuf before 5.12"
        yield warn(found, "a kernel from 5.14 on; 6.1 or later is what is tested")
    else:
        yield ok(f"Linux {text}")


def check_clock(look: Look) -> Findings:
    name = look.tree.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if name is None:
        yield skip("the kernel does not say its clock source")
    elif name in _SLOW_CLOCKS:
        remedy = "find out why the kernel gave tsc up (dmesg | grep -i tsc), or boot with tsc=reliable"
        yield warn(f"clock source {name}: each look at the clock is a slow call", remedy)
    else:
        yield ok(f"clock source {name}")


def check_huge_pages(look: Look) -> Findings:
    total, free = (look.tree.number(f"{_HUGE}/{name}_hugepages") or 0 for name in ("nr", "free"))
    mode = _chosen(look.tree.text(f"{_TRANSPARENT}/enabled"))
    needed = look.wanted.pool_bytes // _HUGE_BYTES + 1 if look.wanted.pool_bytes else 0
    words = f"{free} of {total} pages of 2 MiB set aside are free; transparent ones: {mode or 'not known'}"
    if needed and not look.wanted.shared_pool and free >= needed:
        yield ok(f"{words}; the pool takes {needed}")
    elif total and needed:
        remedy = (
            f"sysctl vm.nr_hugepages={total - free + needed}, or 0: now they lie idle, and the pool takes other memory"
        )
        yield warn(f"{words}; the pool would take {needed}", remedy)
    elif mode == "never":
        remedy = f"echo madvise > {_TRANSPARENT}/enabled; or set pages aside: sysctl vm.nr_hugepages"
        yield warn(f"{words}: the pool gets pages of 4 KiB, a device reads each block in four parts", remedy)
    else:
        yield ok(words)
    if look.wanted.shared_pool:
        yield _shared_huge(look)


def _shared_huge(look: Look) -> Finding:
    mode = _chosen(look.tree.text(f"{_TRANSPARENT}/shmem_enabled"))
    if mode in ("advise", "always", "within_size", "force"):
        return ok(f"shared memory, for 3FS's rings, gets huge pages: {mode}")
    return warn(
        f"shared memory, for 3FS's rings, gets no huge pages: shmem_enabled is {mode or 'not known'}",
        f"echo advise > {_TRANSPARENT}/shmem_enabled",
    )


def _chosen(text: str | None) -> str:
    """Of "always [madvise] never"."""
    return (text or "").partition("[")[2].partition("]")[0]


def check_shm(look: Look) -> Findings:
    place = look.tree.at("/dev/shm")
    if not place.is_dir():
        yield warn("there is no /dev/shm", "mount -t tmpfs tmpfs /dev/shm")
        return
    usage = shutil.disk_usage(place)
    found = f"/dev/shm: {amount_text(usage.free)} of {amount_text(usage.total)} are free"
    needed_gib = -(-(look.wanted.pool_bytes * look.wanted.shared_pool + _SHM_BYTES_MIN) >> 30)
    remedy = f"mount -o remount,size={needed_gib}G /dev/shm, or more; in a container: --shm-size={needed_gib}g"
    if look.wanted.shared_pool and usage.free <= look.wanted.pool_bytes + _HUGE_BYTES:
        yield fail(f"{found}, the pool that 3FS's client maps has {amount_text(look.wanted.pool_bytes)}", remedy)
    elif usage.total < _SHM_BYTES_MIN:
        yield warn(f"{found}: engines and their libraries want more", remedy)
    else:
        yield ok(found)


def check_ptrace(look: Look) -> Findings:
    """The shm transport pulls from other processes of its user."""
    level = look.tree.number("/proc/sys/kernel/yama/ptrace_scope")
    needs_it = look.wanted.transport == "shm"
    if level is None:
        yield ok("Yama is not there: processes of one user may read each other")
    elif level <= 1:
        yield ok(f"kernel.yama.ptrace_scope is {level}")
    elif level == 2 and process.has_capability(look.tree, "SYS_PTRACE"):
        yield ok("kernel.yama.ptrace_scope is 2, and this user has CAP_SYS_PTRACE")
    else:
        found = f"kernel.yama.ptrace_scope is {level}: one process may not read another's memory"
        remedy = 'sysctl kernel.yama.ptrace_scope=1, for transport.kind = "shm"; at 3 only a reboot changes it'
        yield (
            fail_if(True, found, remedy)
            if needs_it
            else skip(f'{found}; only transport.kind = "shm" needs that', remedy)
        )


def check_uring(look: Look) -> Findings:
    """The storage's own trial, and what the system says of it."""
    refused = uring_refusal()
    switch = look.tree.number("/proc/sys/kernel/io_uring_disabled")
    words = {
        None: "",
        0: "kernel.io_uring_disabled is 0",
        1: "kernel.io_uring_disabled is 1: only for its group or root",
    }
    said = words.get(switch, f"kernel.io_uring_disabled is {switch}")
    if not refused:
        yield ok("; ".join(filter(None, ("io_uring works", said))))
        return
    found = "; ".join(filter(None, (f"io_uring can't be used: {refused}", said)))
    remedy = next((text for sign, text in _URING_SIGNS.items() if sign in refused), _URING_REMEDY)
    asked = not look.wanted.storage_kinds or bool({"auto", "uring", "usrbio"} & set(look.wanted.storage_kinds))
    yield warn(found, remedy) if asked else skip(found, remedy)


def check_copy_loop(look: Look) -> Findings:
    from kvmoverd.adapters.memory.iovec import COMPILED, SUMS  # noqa: PLC0415 - loads numpy

    if not COMPILED:
        found = "the kernel copies (process_vm_readv): the compiled loop does not load"
        yield warn(found, "install gcc and Python's headers, then this package anew")
    elif not SUMS:
        yield ok("the compiled loop copies; this processor can't sum what it copies (no SSE 4.2)")
    else:
        yield ok("the compiled loop copies, and sums what it copies")

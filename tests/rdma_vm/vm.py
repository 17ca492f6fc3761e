"""Boots the VM and runs one command in it. Bounded in every state, and no qemu outlives the process that began it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.rdma_vm.image import HERE, Image

BOOT_S = 60.0
BOOTS_MAX = 2
GRACE_S = 15.0
"""Of a VM whose command should have ended: the guest counts in its own time."""
OUTPUT_BYTES_MAX = 64 << 20
POLL_S = 0.05
TIME_LIMIT = 124
"""Exit code of a command that took too long, as timeout(1) has it."""
CPU = "max,avx2=off"
"""As QEMU emulates AVX2, a masked load faults where its masked part lies in a page that is not there. NumPy sorts with such."""
BEGINS = b"rdma_vm: command begins"
HIDDEN = ("/tmp", "/run", "/dev", "/proc", "/sys")
"""What the guest has its own of: a folder of the host below these has to be mounted by itself."""
FOLDERS_MAX = 5
"""A microvm has eight places for devices, three of which are taken."""
PASSED_ON = ("PATH", "PYTHONPATH", "VIRTUAL_ENV")


class VmFailed(Exception):
    """The VM did not come up, or died; has the end of its console."""


class BootHung(Exception):
    """Nothing of the command has run."""


@dataclass(frozen=True, slots=True)
class Order:
    """One command, in `folder`. Of the host it sees everything, and changes nothing but what is `writable`."""

    command: Sequence[str]
    folder: Path
    limit_s: float = 300.0
    writable: Sequence[Path] = ()
    cpus: int = 1
    memory_mib: int = 2048
    environment: Mapping[str, str] = field(default_factory=dict)
    console: Path | None = None
    """Where the kernel's console is copied to, for a look at a VM that behaves oddly."""

    @property
    def folders(self) -> list[tuple[str, Path]]:
        """Mode and path of what is mounted by itself."""
        own = [("rw", path.resolve()) for path in self.writable]
        seen = (self.folder.resolve(), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve())
        for path in dict.fromkeys(seen):
            under = any(path.is_relative_to(mounted) for _, mounted in own)
            if str(path).startswith(tuple(f"{hidden}/" for hidden in HIDDEN)) and not under:
                own.append(("ro", path))
        if len(own) > FOLDERS_MAX:
            raise ValueError(f"{len(own)} folders would be mounted, {FOLDERS_MAX} can be")
        # The outer ones first, else they cover the inner.
        return sorted(own, key=lambda row: len(row[1].parts))


def run(image: Image, order: Order, echo: Callable[[bytes], object]) -> int:
    """Exit code of the command, `TIME_LIMIT` past its limit; `echo` gets its output as it comes.

    A boot that hangs, which emulation on a busy host does at times, is repeated. Raises `VmFailed`.
    """
    control = Path(tempfile.mkdtemp(prefix="rdma_vm."))
    try:
        for attempt in range(1, BOOTS_MAX + 1):
            _write_order(control, order)
            try:
                return _Boot(image, order, control).ended(echo)
            except BootHung:
                print(f"rdma_vm: boot {attempt} hung: {_tail(control)[-200:]}", file=sys.stderr, flush=True)
        raise VmFailed(f"{BOOTS_MAX} boots hung for {BOOT_S:g} s each\n{_tail(control)}")
    finally:
        if order.console:
            shutil.copy(control / "console", order.console)
        shutil.rmtree(control)


def _write_order(control: Path, order: Order) -> None:
    """All that `guest/start.sh` reads."""
    shutil.copy(HERE / "guest/start.sh", control)
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | dict(order.environment)
    folders = " ".join(shlex.quote(f"{mode} {path}") for mode, path in order.folders)
    lines = [f"folders=({folders})", f"work_folder={shlex.quote(str(order.folder.resolve()))}"]
    lines += [f"limit_s={order.limit_s:g}", *(f"export {name}={shlex.quote(passed[name])}" for name in passed)]
    (control / "order.sh").write_text("\n".join(lines) + "\n")
    (control / "command.sh").write_text(f"exec {shlex.join(order.command)}\n")
    for name in ("out", "console", "qemu"):
        (control / name).write_bytes(b"")
    (control / "code").unlink(missing_ok=True)


def _tail(control: Path) -> str:
    """The end of what console and qemu said."""
    return "\n".join((control / name).read_bytes()[-2000:].decode(errors="replace") for name in ("console", "qemu"))


class _Boot:
    """One qemu, from its start to its end."""

    def __init__(self, image: Image, order: Order, control: Path) -> None:
        self.order, self.control = order, control
        # The kernel kills qemu when this process dies, however it dies.
        self.command = ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", *_machine(image, order, control)]

    def ended(self, echo: Callable[[bytes], object]) -> int:
        with (
            (self.control / "qemu").open("wb") as words,
            (self.control / "out").open("rb") as out,
            subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=words, stderr=words) as qemu,
        ):
            try:
                late = self._watched(qemu, lambda: echo(out.read()))
            finally:
                qemu.kill()
            qemu.wait()
            echo(out.read())
        code = self.control / "code"
        if code.exists():
            return int(code.read_text())
        if late:
            return TIME_LIMIT
        raise VmFailed(f"the VM ended without an exit code\n{_tail(self.control)}")

    def _watched(self, qemu: subprocess.Popen[bytes], forward: Callable[[], object]) -> bool:
        """Waits for the end of qemu; True when it is out of time, or has said too much. Raises `BootHung`."""
        boot_until_s = time.monotonic() + BOOT_S
        until_s: float | None = None
        while qemu.poll() is None:
            forward()
            now_s = time.monotonic()
            if until_s is None and BEGINS in (self.control / "console").read_bytes():
                until_s = now_s + self.order.limit_s + GRACE_S
            if until_s is None and now_s > boot_until_s:
                raise BootHung
            if until_s is not None and now_s > until_s:
                return True
            if (self.control / "out").stat().st_size > OUTPUT_BYTES_MAX:
                return True
            time.sleep(POLL_S)
        return False


def _machine(image: Image, order: Order, control: Path) -> list[str]:
    """Arguments of qemu: pure emulation. KVM, where there is one, is often another hypervisor's that can't run this kernel."""
    line = (
        "console=ttyS0 loglevel=4 panic=-1 reboot=t mitigations=off nokaslr random.trust_cpu=on audit=0 apparmor=0 "
        # An emulated processor's TSC is the host's, and measuring it against emulated timers fails on a busy host.
        f"tsc=reliable tsc_early_khz={_tsc_khz()} no_timer_check"
    )
    arguments = [
        *("-M", "microvm,acpi=on", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", CPU),
        *("-m", str(order.memory_mib), "-smp", str(order.cpus)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initial), "-append", line),
        *("-serial", f"file:{control / 'console'}"),
        *("-device", "virtio-serial-device", "-chardev", f"file,id=out,path={control / 'out'}"),
        *("-device", "virtserialport,chardev=out,name=out"),
    ]
    shared = [("control", control, ""), ("host", Path("/"), ",readonly=on")]
    shared += [(f"folder{at}", path, ",readonly=on" * (mode == "ro")) for at, (mode, path) in enumerate(order.folders)]
    for name, path, readonly in shared:
        source = f"local,id={name},path={str(path).replace(',', ',,')},security_model=none,multidevs=remap{readonly}"
        arguments += ["-fsdev", source, "-device", f"virtio-9p-device,fsdev={name},mount_tag={name}"]
    return arguments


def _tsc_khz() -> int:
    """Rate of this machine's time stamp counter: as its kernel found, else the processor's nominal clock."""
    with subprocess.Popen(["dmesg"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as dmesg:
        found = re.search(r"tsc: Detected (\d+\.\d+) MHz", dmesg.communicate()[0])
    found = found or re.search(r"^cpu MHz\s*:\s*(\d+\.\d+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    if found is None:
        raise VmFailed("the rate of this processor's time stamp counter is not told, by dmesg or by /proc/cpuinfo")
    return int(float(found[1]) * 1000)

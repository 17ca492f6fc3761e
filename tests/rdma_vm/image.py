"""The VM's kernel and initial filesystem, made from Debian's kernel package, which is never installed. Kept in a cache."""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("qemu-system-x86_64", "busybox", "depmod", "modprobe", "setpriv", "ip", "rdma", "tc")
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
# Those needed to reach the host's filesystem first; the rest is RDMA, the cable and its queues. What each depends on is found.
MODULES = (
    *("virtio_mmio", "virtio_console", "9p", "9pnet_virtio", "overlay"),
    *("ib_uverbs", "rdma_ucm", "rdma_rxe", "crc32_generic", "veth", "af_packet"),
    *("sch_prio", "sch_ets", "sch_htb", "sch_tbf", "sch_netem", "cls_u32", "cls_flower"),
)
FOLDERS = (
    "arch/x86/crypto",
    "crypto",
    "drivers/char",
    "drivers/infiniband",
    "drivers/net",
    "drivers/virtio",
    "fs",
    "lib",
    "net",
)
HERE = Path(__file__).parent
PACKAGES = (HERE / "packages.txt").read_text().split()
"""Of Debian, for the host: what the VM runs is the host's."""
SHELL_LIMIT_S = 180.0
LOCK_S = 300.0
"""Some times what making an image takes, downloads included."""


class NoImage(Exception):
    """A VM can't be had here; says what is missing."""


@dataclass(frozen=True, slots=True)
class Image:
    kernel: Path
    initial: Path


def cached() -> Path:
    return Path(os.environ.get("KVMOVERD_VM_CACHE") or Path.home() / ".cache" / "kvmoverd" / "rdma_vm")


def ready() -> Image:
    """The image, made first if there is none of this builder's. Raises `NoImage`.

    Installs the packages that are missing where this is root's Debian; takes 10 s with them, 40 s without.
    """
    if platform.machine() != "x86_64":
        raise NoImage(f"the VM is for x86-64, this is {platform.machine()}")
    _installed()
    builder = hashlib.sha256(Path(__file__).read_bytes() + (HERE / "guest/init").read_bytes()).hexdigest()[:12]
    cached().mkdir(parents=True, exist_ok=True)
    with _alone(cached() / "lock"):
        made = sorted(cached().glob(f"*+{builder}"), key=lambda path: path.stat().st_mtime)
        folder = made[-1] if made else _made(builder)
    return Image(folder / "vmlinux", folder / "initial")


def _installed() -> None:
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing or not PYVERBS.is_dir():
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise NoImage(f"needs {', '.join(missing) or 'pyverbs'}: apt-get install {' '.join(PACKAGES)}")
        _apt("update", "-qq")
        _apt("install", "-qq", "-y", "--no-install-recommends", *PACKAGES)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not list(PYVERBS.glob(f"*{suffix}")):
        raise NoImage(f"{PYVERBS} has nothing for this Python, which loads *{suffix}: {sys.version.split()[0]}")


def _apt(*words: str, folder: Path | None = None) -> None:
    command = ["apt-get", "-o", "Acquire::Retries=3", "-o", "APT::Sandbox::User=root", *words]
    _shell(*command, folder=folder)


def _shell(*command: str, folder: Path | None = None) -> str:
    """Output of a program. Raises `NoImage` with its last words."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SHELL_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoImage(f"{command[0]}: {error}") from error
    if ended.returncode:
        raise NoImage(
            f"{' '.join(command)} ended with {ended.returncode}: {(ended.stderr or ended.stdout)[-500:].strip()}"
        )
    return ended.stdout


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One builder at a time; the kernel lets go of the lock when its holder dies. Raises `NoImage`."""
    until_s = time.monotonic() + LOCK_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as held:
                if time.monotonic() > until_s:
                    raise NoImage(f"another process makes the image for more than {LOCK_S:g} s: {path}") from held
                time.sleep(0.1)
        yield


def _made(builder: str) -> Path:
    """A new folder of the cache, which appears whole or not at all; those of older builders go."""
    package = _kernel_package()
    version = package.removeprefix("linux-image-")
    folder = cached() / f"{version}+{builder}"
    with tempfile.TemporaryDirectory(dir=cached(), prefix="making.") as name:
        work = Path(name)
        _apt("-qq", "download", package, folder=work)
        (deb,) = work.glob("*.deb")
        _extract(deb, version, work)
        _shell("depmod", "-b", str(work), version)
        done = work / "done"
        done.mkdir()
        (done / "vmlinux").write_bytes(_uncompressed((work / f"boot/vmlinuz-{version}").read_bytes()))
        (done / "initial").write_bytes(_initial(work, version))
        for old in cached().glob("*+*"):
            shutil.rmtree(old)
        done.rename(folder)
    return folder


def _kernel_package() -> str:
    """The package that `linux-image-amd64` stands for. The cloud kernel has no RDMA."""
    for attempt in range(2):
        for line in _shell("apt-cache", "depends", "linux-image-amd64").splitlines() if attempt or _has_lists() else ():
            kind, _, name = line.strip().partition(" ")
            if kind == "Depends:" and name.startswith("linux-image-"):
                return name
        _apt("update", "-qq")
    raise NoImage("no linux-image-amd64 among the packages: is this Debian?")


def _has_lists() -> bool:
    return any(Path("/var/lib/apt/lists").glob("*Packages*"))


def _extract(deb: Path, version: str, into: Path) -> None:
    """Kernel and some folders of modules: 60 MB of 400."""
    modules = f"./lib/modules/{version}/"
    wanted = (f"./boot/vmlinuz-{version}", f"{modules}modules.", *(f"{modules}kernel/{name}/" for name in FOLDERS))
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE) as unpacked,
        tarfile.open(fileobj=unpacked.stdout, mode="r|") as archive,
    ):
        archive.extractall(into, (member for member in archive if member.name.startswith(wanted)), filter="data")


def _uncompressed(kernel: bytes) -> bytes:
    """The ELF inside a bzImage: qemu starts it as it is, and no decompression is emulated."""
    at = -1
    while (at := kernel.find(b"\xfd7zXZ\x00", at + 1)) >= 0:
        try:
            found = lzma.LZMADecompressor(format=lzma.FORMAT_XZ).decompress(kernel[at:])
        except lzma.LZMAError:
            continue
        if found.startswith(b"\x7fELF"):
            return found
    raise NoImage("the kernel's package holds no kernel packed with xz")


def _initial(work: Path, version: str) -> bytes:
    """Busybox, `init`, and all modules with the order in which they can be loaded."""
    order: dict[str, bytes] = {}
    for module in MODULES:
        needs = _shell("modprobe", "-d", str(work), "-S", version, "--show-depends", module)
        for line in needs.splitlines():
            if line.startswith("insmod"):
                path = Path(line.split()[1])
                order.setdefault(path.name, path.read_bytes())
    busybox = shutil.which("busybox")
    assert busybox, "looked for at the beginning"
    files = {
        "init": (HERE / "guest/init").read_bytes(),
        "bin/busybox": Path(busybox).read_bytes(),
        "modules/order": "".join(f"{name}\n" for name in order).encode(),
        **{f"modules/{name}": content for name, content in order.items()},
    }
    folders = ("bin", "modules", "proc", "sys", "dev", "control", "host", "layer", "root")
    return _cpio([(name, 0o040755, b"") for name in folders] + [(name, 0o100755, files[name]) for name in files])


def _cpio(entries: list[tuple[str, int, bytes]]) -> bytes:
    """An archive in the kernel's format, "newc": (name, mode, content) each."""
    out = bytearray()
    for inode, (name, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        out += b"070701" + "".join(f"{field:08x}" for field in fields).encode() + name.encode() + b"\0"
        out += bytes(-len(out) % 4) + content
        out += bytes(-len(out) % 4)
    return bytes(out)

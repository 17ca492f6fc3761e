"""What a machine may lack: one marker each, with the reason that a skipped test prints; and what only slow runs try."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvmoverd.adapters.memory.cuda_library import load_cuda
from kvmoverd.adapters.memory.iovec import COMPILED, SUMS
from kvmoverd.core.errors import NoCuda


def slow_only(values: Iterable[object]) -> list[Any]:
    """Values of a parameter that the quick tests leave out: more seeds, longer walks."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


def _has_direct_io(directory: Path) -> bool:
    """True where a file in `directory` can be opened with O_DIRECT; tmpfs can only since Linux 6.6."""
    with tempfile.NamedTemporaryFile(dir=directory) as probe:
        try:
            os.close(os.open(probe.name, os.O_RDWR | os.O_DIRECT))
        except OSError:
            return False
    return True


def _may_read_other_processes() -> bool:
    """Yama's 2 and 3 leave process_vm_readv to root, or to nobody."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    level = int(scope.read_text()) if scope.exists() else 0
    return level <= 1 or (level == 2 and os.geteuid() == 0)


def _has_huge_pages() -> bool:
    """True where two pages of hugetlb are free: what the tests of such regions take."""
    pool = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return pool.exists() and int(pool.read_text()) >= 2


def _missing_gpu() -> str:
    """Why no GPU can be used here; empty where one can."""
    try:
        load_cuda()
    except NoCuda as error:
        return str(error)
    return ""


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts or changes owners")
needs_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv, to take a capability away")
needs_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may do what this test expects to be refused")
needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="needs IPv6 on the loopback interface")
needs_direct_io = pytest.mark.skipif(
    not _has_direct_io(Path(tempfile.gettempdir())), reason="needs O_DIRECT on the filesystem of temporary files"
)
needs_vm_readv = pytest.mark.skipif(
    not _may_read_other_processes(), reason="needs process_vm_readv: kernel.yama.ptrace_scope forbids it"
)
needs_compiled_copy = pytest.mark.skipif(not COMPILED, reason="needs the compiled copy loop: built without a compiler")
needs_sums = pytest.mark.skipif(
    not SUMS, reason="needs the compiled copy loop, and a processor that can compute CRC-32C"
)
needs_huge_pages = pytest.mark.skipif(not _has_huge_pages(), reason="needs 2 free pages of hugetlb: vm.nr_hugepages")

HAS_RXE = all(Path("/sys/class/infiniband", name).exists() for name in ("rxe0", "rxe1"))
needs_rxe = pytest.mark.skipif(
    not HAS_RXE, reason="needs the RDMA devices rxe0 and rxe1, wired to each other: make test-rdma has them"
)
needs_opensm = pytest.mark.skipif(shutil.which("opensm") is None, reason="needs opensm: apt-get install opensm")
_NO_GPU = _missing_gpu()
needs_gpu = pytest.mark.skipif(bool(_NO_GPU), reason=f"needs a GPU: {_NO_GPU}")


def skip_no_fuse(why: str) -> str:
    """Why a FUSE filesystem of the tests can't be had."""
    return f"needs root and /dev/fuse: {why}"


def skip_no_mount(why: str) -> str:
    """Why nothing can be mounted."""
    return f"needs a kernel and a container that let root mount: {why}"


def skip_no_loop(why: str) -> str:
    """Why a file can't be made a block device."""
    return f"needs root, losetup and a free loop device: {why}"


def skip_no_queue(why: str) -> str:
    """Why a network namespace of the tests can't have the queue in question."""
    return f"needs root, network namespaces, and a kernel with that queue: {why}"

"""Trees of /sys and /proc that are damaged at random: every check still says something of the machine, and none waits."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from kvmoverd.adapters.doctor.checks import CHECKS
from kvmoverd.adapters.doctor.finding import Look, Wanted
from kvmoverd.adapters.doctor.run import findings_of
from tests.unit.sysfs_kit import Machine, eight_pairs

OF_THIS_MACHINE = {"rdma_library", "rdma_posting", "io_uring", "copy_loop"}
"""What they look at is no tree."""
NOT_ITS_FAULT = "the check itself failed"
WANTED = (
    Wanted(),
    Wanted(
        "verbs",
        "verbs",
        1 << 30,
        devices=("rxe0",),
        gpus={"0000:f2:00.0": "mlx5_9"},
        listen_hosts=("127.0.0.1",),
        storage_kinds=("threads",),
        storage_paths=("/tmp",),
    ),
)
FILES = {
    "/proc/meminfo": "MemTotal: 100 kB\nHugePages_Total: 3\nHugepagesize: 2048 kB",
    "/proc/self/limits": "Limit  Soft  Hard  Units\nMax locked memory  65536  65536  bytes\nMax open files  1024  1024  files",
    "/proc/self/cgroup": "0::/a/b",
    "/proc/self/mountinfo": "1 2 0:1 / /dev/shm rw - tmpfs shm rw",
    "/proc/sys/vm/max_map_count": "65530",
    "/proc/sys/kernel/yama/ptrace_scope": "1",
    "/sys/fs/cgroup/a/b/memory.max": "max",
    "/proc/cmdline": "iommu=pt",
}


def damaged(root: Path, chance: random.Random) -> Machine:
    """A machine with two CNICs and a GPU, some of whose files are something else, and some of whose directories are gone."""
    machine = Machine(root)
    if chance.random() < 0.3:
        eight_pairs(machine)
    machine.cnic("rxe0", netdev="veth0", gids=(("fe80::1", "IB/RoCE v1"), ("::ffff:10.0.0.1", "RoCE v2")))
    machine.cnic("mlx5_9", "pci0000:f0/f0:01.0/f1:00.0", netdev="eth9", gids=(("::ffff:10.0.0.2", "RoCE v2"),))
    machine.gpu("pci0000:f0/f0:02.0/f2:00.0")
    for path, text in FILES.items():
        machine.write(path, text)
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    for path in chance.sample(files, max(1, int(len(files) * chance.choice((0.02, 0.1, 0.4))))):
        path.unlink()
        spoil(path, chance)
    directories = sorted(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())
    for path in chance.sample(directories, 2):
        if path.exists() and chance.random() < 0.5:
            shutil.rmtree(path)
            chance.choice((lambda path: path.write_text("x"), lambda path: path.symlink_to(path.name)))(path)
    return machine


def spoil(path: Path, chance: random.Random) -> None:
    match chance.choice(("noise", "much", "loop", "directory", "digits", "pipe", "less", "nothing")):
        case "noise":
            path.write_bytes(chance.randbytes(300))
        case "much":
            path.write_bytes(b"9" * (3 << 20))
        case "loop":
            path.symlink_to(path.name)
        case "directory":
            path.mkdir()
        case "digits":
            path.write_text("9" * chance.choice((20, 400, 5_000)))
        case "pipe":
            os.mkfifo(path)
        case "less":
            path.write_text("-1")
        case _:
            path.write_bytes(b"")


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_tree_is_something_to_say_and_not_the_checks_own_failure(tmp_path: Path, seed: int) -> None:
    machine = damaged(tmp_path / "machine", random.Random(seed))
    for check in CHECKS:
        if check.name in OF_THIS_MACHINE:
            continue
        for wanted in WANTED:
            began_s = time.monotonic()
            found = findings_of(check, Look(machine.tree, wanted))
            assert found and time.monotonic() - began_s < check.limit_s, (
                f"seed {seed}: {check.name} waits for something"
            )
            said = [finding.found for finding in found if NOT_ITS_FAULT in finding.found]
            assert not said, f"seed {seed}: {check.name}: {said}"
    shutil.rmtree(machine.root)


def test_a_pipe_in_the_place_of_a_file_is_an_empty_file(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert machine.tree.content("/pipe") == b""
    assert (
        machine.tree.content("/pi\0pe") is None and not machine.tree.names("/pi\0pe") and not machine.tree.exists("/\0")
    )

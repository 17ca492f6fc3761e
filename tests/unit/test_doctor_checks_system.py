"""What doctor says of limits, memory and the kernel, over trees of files as such machines have them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvmoverd.adapters.doctor import system
from kvmoverd.adapters.doctor.finding import Status, Wanted
from kvmoverd.adapters.doctor.limits import check_files, check_groups, check_maps, check_memlock, check_unit
from kvmoverd.adapters.doctor.storage_nic import storage_server
from kvmoverd.adapters.doctor.system import (
    check_clock,
    check_huge_pages,
    check_kernel,
    check_ptrace,
    check_shm,
    check_uring,
)
from tests.unit.doctor_kit import LITTLE, UNLIMITED, VERBS, one, see, statuses
from tests.unit.sysfs_kit import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("limits", "capabilities", "wanted", "status"),
    [
        (UNLIMITED, "0", VERBS, "ok"),
        (LITTLE, "0", VERBS, "fail"),
        (LITTLE, "0000000000004000", VERBS, "ok"),
        (LITTLE, "0", Wanted(), "ok"),
        ("", "0", Wanted(), "skip"),
    ],
)
def test_locked_memory_must_hold_the_pool_where_rdma_registers_it(
    machine: Machine, limits: str, capabilities: str, wanted: Wanted, status: str
) -> None:
    machine.write("/proc/self/limits", limits)
    machine.write("/proc/self/status", f"CapEff:\t{capabilities}")
    assert one(check_memlock, machine, wanted).status.value == status


def test_root_of_a_containers_own_users_has_no_right_to_lock(machine: Machine) -> None:
    machine.write("/proc/self/limits", LITTLE)
    machine.write("/proc/self/status", "CapEff:\t000001ffffffffff")
    machine.write("/proc/self/uid_map", "         0     100000      65536")
    assert one(check_memlock, machine, VERBS).status is Status.FAIL


def test_a_unit_is_read_with_its_drop_ins_as_systemd_does(machine: Machine) -> None:
    assert one(check_unit, machine, VERBS).status is Status.SKIP
    machine.write(
        "/usr/lib/systemd/system/kvmoverd.service",
        "[Unit]\nDescription=x\n[Service]\nLimitMEMLOCK=8M\nLimitNOFILE=65536\n# PrivateDevices=yes\nPrivateDevices=yes",
    )
    locked, hidden = see(check_unit, machine, VERBS)
    assert locked.status is Status.FAIL and "may lock 8M" in locked.found
    assert hidden.status is Status.FAIL and "PrivateDevices" in hidden.found
    machine.write(
        "/etc/systemd/system/kvmoverd.service.d/10-rdma.conf", "[Service]\nLimitMEMLOCK=infinity\nPrivateDevices=no"
    )
    finding = one(check_unit, machine, VERBS)
    assert finding.status is Status.OK and "LimitMEMLOCK=infinity, LimitNOFILE=65536" in finding.found


def test_a_unit_with_less_memory_than_the_pool_fails(machine: Machine) -> None:
    text = "[Service]\nMemoryMax=32G\nLimitMEMLOCK=infinity\nLimitNOFILE=65536\nRestrictAddressFamilies=AF_INET"
    machine.write("/etc/systemd/system/kvmoverd.service", text)
    memory, families = see(check_unit, machine, VERBS)
    assert "32 GiB of memory, the pool alone has 40 GiB" in memory.found and "Unix sockets" in families.found


def test_the_managers_defaults_count_where_the_unit_says_nothing(machine: Machine) -> None:
    machine.write("/etc/systemd/system/kvmoverd.service", "[Service]\nExecStart=kvmoverd serve")
    (finding,) = see(check_unit, machine)
    assert finding.status is Status.WARN and "1024:524288 files" in finding.found
    machine.write("/etc/systemd/system.conf", "[Manager]\n#DefaultLimitNOFILE=1\nDefaultLimitNOFILE=65536")
    assert one(check_unit, machine).status is Status.OK


def test_few_files_and_few_mappings_are_told(machine: Machine) -> None:
    machine.write("/proc/self/limits", "Max open files            1024                 524288               files")
    machine.write("/proc/sys/vm/max_map_count", 30_000)
    assert one(check_files, machine).status is Status.WARN
    assert one(check_maps, machine).status is Status.WARN


def test_the_smallest_of_all_control_groups_counts_in_both_versions(machine: Machine) -> None:
    machine.write("/proc/self/cgroup", "9:name=systemd:/\n4:memory:/box\n3:pids:/box\n0::/a/b")
    machine.write("/sys/fs/cgroup/a/memory.max", 16 << 30)
    machine.write("/sys/fs/cgroup/a/b/memory.max", "max")
    machine.write("/sys/fs/cgroup/memory/box/memory.limit_in_bytes", 64 << 30)
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", 0x7FFFFFFFFFFFF000)
    machine.write("/sys/fs/cgroup/pids/box/pids.max", 100)
    memory, tasks = see(check_groups, machine, VERBS)
    assert memory.status is Status.FAIL and memory.found.startswith("/sys/fs/cgroup/a/memory.max is 16 GiB")
    assert tasks.status is Status.WARN and "pids.max is 100" in tasks.found
    assert see(check_groups, machine)[0].status is Status.OK


def test_a_control_group_that_limits_queue_pairs_is_told(machine: Machine) -> None:
    machine.write("/proc/self/cgroup", "0::/box")
    machine.write(
        "/sys/fs/cgroup/box/rdma.max", "mlx5_0 hca_handle=max hca_object=100\nmlx5_1 hca_handle=max hca_object=max"
    )
    found = see(check_groups, machine, VERBS)
    assert [finding.found for finding in found if "rdma.max" in finding.found] == [
        "/sys/fs/cgroup/box/rdma.max limits mlx5_0: hca_object=100"
    ]


# the system


@pytest.mark.parametrize(
    ("total", "free", "mode", "wanted", "status"),
    [
        (0, 0, "always [madvise] never", VERBS, "ok"),
        (0, 0, "always madvise [never]", VERBS, "warn"),
        (20_481, 20_481, "[never]", VERBS, "ok"),
        (20_480, 20_480, "[always] madvise", VERBS, "warn"),
        (0, 0, "[always] madvise", Wanted(), "ok"),
    ],
)
def test_huge_pages_are_enough_for_the_pool_or_transparent(
    machine: Machine, total: int, free: int, mode: str, wanted: Wanted, status: str
) -> None:
    machine.write("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", total)
    machine.write("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", free)
    machine.write("/sys/kernel/mm/transparent_hugepage/enabled", mode)
    assert one(check_huge_pages, machine, wanted).status.value == status


def test_shared_pools_want_huge_pages_of_shared_memory(machine: Machine) -> None:
    machine.write("/sys/kernel/mm/transparent_hugepage/enabled", "[always]")
    machine.write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force")
    found = see(check_huge_pages, machine, Wanted(transport="tcp", pool_bytes=1 << 30, shared_pool=True))
    assert statuses(found) == "ok warn" and "shmem_enabled is never" in found[1].found


def test_shared_memory_must_hold_a_shared_pool(machine: Machine) -> None:
    assert one(check_shm, machine).status is Status.WARN
    machine.tree.at("/dev/shm").mkdir(parents=True)
    huge = Wanted(transport="tcp", pool_bytes=1 << 50, shared_pool=True)
    finding = one(check_shm, machine, huge)
    assert finding.status is Status.FAIL and finding.remedy.startswith("mount -o remount,size=1048577G /dev/shm")


@pytest.mark.parametrize(
    ("level", "transport", "status"), [(None, "shm", "ok"), (1, "shm", "ok"), (2, "shm", "fail"), (3, "tcp", "skip")]
)
def test_yama_matters_to_the_shm_transport(machine: Machine, level: int | None, transport: str, status: str) -> None:
    if level is not None:
        machine.write("/proc/sys/kernel/yama/ptrace_scope", level)
    assert one(check_ptrace, machine, Wanted(transport=transport)).status.value == status


@pytest.mark.parametrize(
    ("refused", "remedy"),
    [
        ("the trial was ended by signal 4 (Illegal instruction)", "this processor lacks instructions"),
        ("the trial was not done within 5 s", "once the machine is less busy"),
        ("Operation not permitted", "kernel.io_uring_disabled=0"),
    ],
)
def test_what_can_be_done_for_io_uring_depends_on_how_its_trial_failed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, refused: str, remedy: str
) -> None:
    monkeypatch.setattr(system, "uring_refusal", lambda: refused)
    finding = one(check_uring, machine)
    assert finding.status is Status.WARN and refused in finding.found and remedy in finding.remedy


def test_old_kernels_and_slow_clocks_are_told(machine: Machine) -> None:
    assert one(check_kernel, machine).status is Status.SKIP
    machine.write("/proc/sys/kernel/osrelease", "5.10.0-28-amd64")
    machine.write("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet")
    assert one(check_kernel, machine).status is Status.WARN
    assert one(check_clock, machine).status is Status.WARN
    machine.write("/proc/sys/kernel/osrelease", "6.1.0-57-amd64")
    assert one(check_kernel, machine).found == "Linux 6.1.0-57-amd64"


def test_the_server_of_a_mount_is_that_of_the_innermost_one(machine: Machine) -> None:
    machine.write(
        "/proc/self/mountinfo",
        "22 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "30 22 0:50 / /mnt/kv rw - nfs4 server:/kv rw,vers=4.2,hard,addr=10.1.2.3\n"
        "31 30 0:51 / /mnt/kv/local rw - xfs /dev/nvme0n1 rw\n",
    )
    assert storage_server(machine.tree, "/mnt/kv/store") == "10.1.2.3"
    assert storage_server(machine.tree, "/mnt/kv/local/store") == ""
    assert storage_server(machine.tree, "/mnt/kvx") == ""


def test_the_page_about_doctor_names_every_check_and_no_other() -> None:
    from kvmoverd.adapters.doctor.checks import CHECKS

    page = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text()
    named = set(re.findall(r"^\| `([a-z0-9_]+)` \|", page, re.MULTILINE))
    assert named == {check.name for check in CHECKS} | {"config", "storage"} | {status.value for status in Status}
    for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL):
        assert json.loads(block)

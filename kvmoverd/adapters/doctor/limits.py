"""Checks of what this process, and the unit that will run the daemon, may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvmoverd.adapters.doctor.finding import Finding, Findings, Look, fail, fail_if, ok, skip, warn
from kvmoverd.adapters.doctor.rdma import used_ports
from kvmoverd.adapters.storage.inspect.text import amount_text
from kvmoverd.adapters.sysfs import process, systemd
from kvmoverd.adapters.sysfs.process import UNLIMITED

UNIT = "kvmoverd.service"
FILES_MIN = 8192
"""Segments that stay open, and a few descriptors for each call and engine."""
TASKS_MIN = 1024
"""Threads of storage roots, transports, gRPC."""
MAPS_MIN = 65_530
_DEFAULT_MEMLOCK = "8M"
_MEMLOCK_REMEDY = (
    "LimitMEMLOCK=infinity in the unit; ulimit -l unlimited in a shell; in a container --ulimit memlock=-1"
)


def check_memlock(look: Look) -> Findings:
    found = process.limits(look.tree, "Max locked memory")
    if found is None:
        yield skip("/proc/self/limits does not say")
        return
    soft, hard = found
    words = f"{_amount(soft)} (hard limit {_amount(hard)})"
    registers = look.wanted.verbs or bool(used_ports(look))
    if soft == UNLIMITED:
        yield ok("locked memory is not limited")
    elif process.has_capability(look.tree, "IPC_LOCK"):
        yield ok(
            f"locked memory is limited to {words}, but not for this user: CAP_IPC_LOCK; see `unit` for the daemon's"
        )
    elif look.wanted.verbs and soft < look.wanted.pool_bytes:
        pool = amount_text(look.wanted.pool_bytes)
        yield fail(f"locked memory is limited to {words}, the pool to be registered has {pool}", _MEMLOCK_REMEDY)
    elif registers:
        yield warn(f"locked memory is limited to {words}: RDMA registers the pool and all regions", _MEMLOCK_REMEDY)
    else:
        yield ok(
            f"locked memory is limited to {words}: enough without RDMA; io_uring reads without a registered pool then"
        )


def _amount(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else amount_text(limit)


def check_unit(look: Look) -> Findings:
    """What systemd will give the daemon, which is not what a shell gives."""
    found = systemd.unit_settings(look.tree, UNIT)
    if found is None:
        yield skip(f"{UNIT} is not installed here")
        return
    path, settings = found
    limits = {**systemd.default_limits(look.tree), **settings}
    trouble = list(_unit_trouble(look, settings, limits))
    yield from trouble
    if not trouble:
        told = ", ".join(
            f"{name}={settings[name]}" for name in sorted(settings) if name.startswith(("Limit", "Tasks", "Memory"))
        )
        yield ok(f"{path}: {told or 'no limits of its own'}")


def _unit_trouble(look: Look, settings: Mapping[str, str], limits: Mapping[str, str]) -> Iterator[Finding]:
    edit = f"systemctl edit {UNIT}, [Service], "
    memlock = limits.get("LimitMEMLOCK") or _DEFAULT_MEMLOCK
    least, most = look.wanted.pool_bytes, systemd.amount(memlock)
    if most is not None and (look.wanted.verbs or used_ports(look)) and (not least or most < least):
        found = f"{UNIT} may lock {memlock}: RDMA registers the pool and all regions"
        yield fail_if(look.wanted.verbs, found, f"{edit}LimitMEMLOCK=infinity")
    files = limits.get("LimitNOFILE", "1024:524288")
    most_files = systemd.amount(files)
    if most_files is not None and most_files < FILES_MIN:
        yield warn(f"{UNIT} may open {files} files, {FILES_MIN} are wanted", f"{edit}LimitNOFILE=65536")
    memory = systemd.amount(settings.get("MemoryMax", systemd.UNLIMITED))
    if memory is not None and memory <= least:
        found = f"{UNIT} may have {amount_text(memory)} of memory, the pool alone has {amount_text(least)}"
        yield fail(found, f"{edit}MemoryMax= with room for the pool and a few GiB")
    if systemd.is_true(settings.get("PrivateDevices", "")) and (look.wanted.verbs or used_ports(look)):
        yield fail_if(look.wanted.verbs, f"{UNIT} hides /dev/infiniband: PrivateDevices", f"{edit}PrivateDevices=no")
    families = settings.get("RestrictAddressFamilies", "")
    if families and not families.startswith("~") and "AF_UNIX" not in families.split():
        yield fail(
            f"{UNIT} forbids Unix sockets, which engines come by",
            f"{edit}RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
        )


def check_files(look: Look) -> Findings:
    found = process.limits(look.tree, "Max open files")
    if found is None:
        yield skip("/proc/self/limits does not say")
        return
    soft, hard = found
    if soft != UNLIMITED and soft < FILES_MIN:
        remedy = "LimitNOFILE=65536 in the unit; ulimit -n 65536 in a shell, as root where the hard limit is lower"
        yield warn(f"{soft} open files at most (hard limit {hard}), {FILES_MIN} are wanted", remedy)
    else:
        yield ok(f"{soft if soft != UNLIMITED else 'any number of'} open files")


def check_groups(look: Look) -> Findings:
    """Limits of the control groups, which beat what the machine has."""
    memory = process.group_limit(look.tree, "memory", ("memory.max", "memory.limit_in_bytes"))
    pool_bytes = look.wanted.pool_bytes
    if memory is None:
        yield ok("no control group limits memory")
    elif memory[0] <= pool_bytes:
        found = f"{memory[1]} is {amount_text(memory[0])}, pool.bytes is {amount_text(pool_bytes)}"
        yield fail(found, "give the container or unit more memory, or lower pool.bytes")
    else:
        yield ok(f"{memory[1]} is {amount_text(memory[0])}")
    tasks = process.group_limit(look.tree, "pids", ("pids.max",))
    if tasks is not None and tasks[0] < TASKS_MIN:
        yield warn(
            f"{tasks[1]} is {tasks[0]}: threads count too, {TASKS_MIN} are wanted",
            "TasksMax=infinity in the unit; in a container --pids-limit=-1",
        )
    else:
        yield ok(f"{tasks[1]} is {tasks[0]}" if tasks else "no control group limits threads")
    yield from _rdma_groups(look)


def _rdma_groups(look: Look) -> Iterator[Finding]:
    for directory in process.group_directories(look.tree, "rdma"):
        for line in look.tree.lines(f"{directory}/rdma.max"):
            device, *limits = line.split()
            tight = [limit for limit in limits if not limit.endswith("=max")]
            if tight and look.wanted.takes(device, 1):
                found = f"{directory}/rdma.max limits {device}: {', '.join(tight)}"
                remedy = (
                    f"as root: echo '{device} hca_handle=max hca_object=max' > {directory}/rdma.max; hca_object counts queue "
                    "pairs and pieces of memory, some hundreds for each peer"
                )
                yield warn(found, remedy)


def check_maps(look: Look) -> Findings:
    number = look.tree.number("/proc/sys/vm/max_map_count")
    if number is None:
        yield skip("vm.max_map_count can't be read")
    elif number < MAPS_MIN:
        yield warn(
            f"vm.max_map_count is {number}: regions and pages of many engines need more",
            f"sysctl vm.max_map_count={MAPS_MIN}",
        )
    else:
        yield ok(f"vm.max_map_count is {number}")

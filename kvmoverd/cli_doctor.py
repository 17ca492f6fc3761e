"""`kvmoverd doctor`: what of this node works, what does not, and what to do. Exit codes: 0 fine, 1 a failure."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvmoverd.adapters.doctor.checks import CHECKS
from kvmoverd.adapters.doctor.finding import Check, Finding, Findings, Look, Status, Wanted, fail, fail_if, ok, warn
from kvmoverd.adapters.doctor.run import run_checks
from kvmoverd.adapters.doctor.text import WIDTH, finding_lines, summary
from kvmoverd.adapters.sysfs.tree import Tree

if TYPE_CHECKING:
    from kvmoverd.config import Config

FINE, WRONG = 0, 1
CONFIG_S = 30.0
"""All of the daemon is loaded."""
STORAGE_S = 30.0
"""A trial in a child process, and filesystems that hang."""
_REMEDIES = {
    "membership": "put the file where [membership.etcd] names it, readable by the daemon; docs/membership.md",
    "pool": "lower pool.bytes and the three shares of it, or set huge pages aside: sysctl vm.nr_hugepages",
    "transport": 'see `rdma_ports` and `rdma_library` above; name other ports in transport.verbs, or set transport.kind = "tcp"',
}
"""By the section of the config that this machine lacks something for."""


def run(config_path: Path | None, *, as_json: bool, watch_s: float, quiet: bool) -> int:
    """Prints what was found; without a config for no daemon in particular. Raises `ConfigError`."""
    checks, wanted = list(CHECKS), Wanted()
    if config_path is not None:
        from kvmoverd import config

        loaded = config.load(config_path)
        wanted = wanted_of(loaded)
        checks += [
            Check("config", partial(check_config, loaded), CONFIG_S),
            Check("storage", partial(check_storage, loaded), STORAGE_S),
        ]
    rows = run_checks(checks, Look(Tree(), wanted, watch_s))
    shown = [row for row in rows if not quiet or row[1].status in (Status.FAIL, Status.WARN)]
    if as_json:
        print(json.dumps([plain(name, finding) for name, finding in shown]))
    else:
        width = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
        for line in finding_lines(shown, width=width):
            print(line)
        print(summary(rows))
    return WRONG if any(finding.status is Status.FAIL for _, finding in rows) else FINE


def plain(name: str, finding: Finding) -> dict[str, str]:
    return {"check": name, "status": finding.status.value, "found": finding.found, "remedy": finding.remedy}


def wanted_of(config: Config) -> Wanted:
    """What the checks need of a config."""
    from kvmoverd.devices_storage import needs_shared_pool

    transport, verbs = config.transport, config.transport.verbs
    hosts = (transport.listen.host, config.node_api.advertise)
    return Wanted(
        transport=transport.kind,
        local=transport.local,
        pool_bytes=config.pool.bytes,
        shared_pool=needs_shared_pool(config),
        listen_hosts=tuple(host for host in hosts if host),
        dscp=transport.dscp,
        so_priority=transport.so_priority,
        marks=verbs.classes,
        devices=verbs.devices,
        exclude=verbs.exclude,
        gid_index=verbs.gid_index,
        gpus=verbs.gpus,
        storage_kinds=tuple(root.kind for root in config.storage),
        storage_paths=tuple(str(root.path) for root in config.storage if root.is_on_disk),
    )


def check_config(config: Config, look: Look) -> Findings:
    """What `check` says of all but the storage."""
    from kvmoverd import devices

    missing = devices.missing_here(config)
    for section, what in missing.items():
        yield fail(f"[{section}]: {what}", _REMEDIES[section])
    if not missing:
        yield ok("serve would find what it needs, beside the storage")


def check_storage(config: Config, look: Look) -> Findings:
    """What `check` says of each root."""
    from kvmoverd.devices_storage import all_on_this_machine

    for root, here in zip(config.storage, all_on_this_machine(config.storage), strict=True):
        told = f"{root.name}: {root.path}" if root.is_on_disk else f"{root.name}: {root.kind}"
        yield from _root(told, here, is_main=root.is_main)


def _root(told: str, here: dict[str, str], *, is_main: bool) -> Iterator[Finding]:
    if missing := here.get("not here"):
        yield fail_if(is_main, f"{told}: {missing}", "`kvmoverd store probe` says what the place can do; docs/store.md")
        return
    troubles = [text for name, text in here.items() if name in ("note", "warning")]
    for text in troubles:
        yield warn(f"{told}: {text}", "docs/store.md, and docs/3fs.md for 3FS")
    if not troubles:
        yield ok(f"{told}, layout {here.get('layout here', 'not known')}")

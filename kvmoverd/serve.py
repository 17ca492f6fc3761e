"""Runs a node's daemon in this process."""

from __future__ import annotations

from kvmoverd import process
from kvmoverd.config import Config
from kvmoverd.daemon import Daemon
from kvmoverd.devices_transport import check_buildable


def run(config: Config, *, until_eof: bool = False) -> int:
    """Serves until SIGTERM or SIGINT; 0 after a clean stop, 1 when something had to be cut short.

    With `until_eof` also until standard input ends.
    """

    def made() -> Daemon:
        check_buildable(config)
        return Daemon(config)

    return process.run(made, f"node {config.node.name}", config.log, until_eof=until_eof)

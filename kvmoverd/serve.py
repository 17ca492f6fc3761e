"""Runs a node's daemon in this process: its loop, its signals, its log."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys

import uvloop

from kvmoverd.adapters.observers.log_writer import start_log
from kvmoverd.config import Config
from kvmoverd.core.errors import ConfigError
from kvmoverd.daemon import Daemon
from kvmoverd.devices_transport import CLOSE_S, check_buildable

log = logging.getLogger(__name__)

STDIN, EOF_READ_BYTES = 0, 4096
SWITCH_S = 0.0005
GC_ALLOCATIONS = 10_000
"""Objects that a start of the collector waits for and looks at: half a millisecond."""


def run(config: Config, *, until_eof: bool = False) -> int:
    """Serves until SIGTERM or SIGINT; 0 after a clean stop, 1 when something had to be cut short.

    With `until_eof` also until standard input ends: that of a process whose parent holds its other end, and may be killed.
    """
    writer = start_log(config.log.level, config.log.format)
    try:
        check_buildable(config)
        return uvloop.run(_serve_until_told(config, until_eof=until_eof))
    finally:
        writer.stop(CLOSE_S)


def _settle_the_interpreter() -> None:
    """What was built lives as long as the daemon, and its requests make no cycles to speak of: reference counts free them.

    With the interpreter's own thresholds the collector takes a fifth of the loop's time while blocks are read, in steps of
    milliseconds. A thread that computes may keep the interpreter lock for `SWITCH_S` while the loop waits for it.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 50, 1000)


def _tell_at_eof(told: asyncio.Event) -> None:
    """Raises `ConfigError` when standard input is nothing that can be waited for."""
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(STDIN, EOF_READ_BYTES):
            loop.remove_reader(STDIN)
            told.set()

    try:
        loop.add_reader(STDIN, readable)
    except OSError as error:
        raise ConfigError(f"standard input can't be waited for, --until-eof needs a pipe: {error.strerror}") from error


async def _serve_until_told(config: Config, *, until_eof: bool) -> int:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    if until_eof:
        _tell_at_eof(told)
    daemon = Daemon(config)
    try:
        await daemon.start()
    except BaseException:
        await daemon.stop()
        raise
    _settle_the_interpreter()
    waits = [asyncio.ensure_future(event.wait()) for event in (told, daemon.broken)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    log.info("node %s stops", config.node.name)
    clean = await daemon.stop() and not daemon.broken.is_set()
    log.info("node %s stopped%s", config.node.name, "" if clean else "; something was cut short")
    return 0 if clean else 1

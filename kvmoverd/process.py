"""Runs one of our services in this process: its loop, its signals, its log."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol

import uvloop

from kvmoverd.adapters.observers.log_writer import start_log
from kvmoverd.config_process import LogConfig
from kvmoverd.core.errors import ConfigError

log = logging.getLogger(__name__)

STDIN, EOF_READ_BYTES = 0, 4096
LOG_S = 3.0
SWITCH_S = 0.0005
GC_ALLOCATIONS = 10_000
"""Objects that a start of the collector waits for and looks at: half a millisecond."""


class Served(Protocol):
    """A service: built by `start`, taken down by `stop`, which is called whatever became of the start."""

    broken: asyncio.Event
    """Set when the service finds a fault of its own and can't go on."""

    async def start(self) -> None:
        """Raises `KvmoverError`."""

    async def stop(self) -> bool:
        """In bounded time; True when nothing had to be cut short."""


def run(make: Callable[[], Served], name: str, log_settings: LogConfig, *, until_eof: bool = False) -> int:
    """Serves until SIGTERM or SIGINT; 0 after a clean stop, 1 when something had to be cut short.

    `make` is called with the log running. With `until_eof` it serves also until standard input ends: that of a process whose
    parent holds its other end, and may be killed.
    """
    writer = start_log(log_settings.level, log_settings.format)
    try:
        return uvloop.run(_serve_until_told(make, name, until_eof=until_eof))
    finally:
        writer.stop(LOG_S)


def _settle_the_interpreter() -> None:
    """What was built lives as long as the service, and its requests make no cycles to speak of: reference counts free them.

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


async def _serve_until_told(make: Callable[[], Served], name: str, *, until_eof: bool) -> int:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    if until_eof:
        _tell_at_eof(told)
    service = make()
    try:
        await service.start()
    except BaseException:
        await service.stop()
        raise
    _settle_the_interpreter()
    waits = [asyncio.ensure_future(event.wait()) for event in (told, service.broken)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    log.info("%s stops", name)
    clean = await service.stop() and not service.broken.is_set()
    log.info("%s stopped%s", name, "" if clean else "; something was cut short")
    return 0 if clean else 1

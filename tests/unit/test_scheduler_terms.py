"""What a scheduler's log says of who leads: daemons' logs name the same boot."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

import pytest

from kvmoverd import config_scheduler
from kvmoverd.scheduler_daemon import SchedulerDaemon

CONFIG = """
[scheduler]
listen = "127.0.0.1:0"
[[models]]
name = "m"
kv_bytes_per_token = 1000
alpha_tokens = 1000000
beta_tokens = 800000
"""


async def test_the_log_names_the_boot_that_leads_and_whom_this_one_stands_by_for_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvmoverd.scheduler_daemon")
    daemon = SchedulerDaemon(config_scheduler.parse(tomllib.loads(CONFIG), Path("/nonexistent")))
    try:
        await daemon.start()
        first = daemon.boot_id
        for leader in ("10.0.0.7:9402", "10.0.0.7:9402", "", "10.0.0.7:9402"):
            daemon.step_down(leader)
        daemon.lead(7)
        second = daemon.boot_id
    finally:
        await daemon.stop()
    told = [line for line in caplog.messages if "decides" in line or "stands by" in line]
    assert told == [
        f"this scheduler decides, epoch 0, boot {first}",
        "this scheduler stands by: 10.0.0.7:9402 leads",
        "this scheduler stands by: nobody is known to lead",
        "this scheduler stands by: 10.0.0.7:9402 leads",
        f"this scheduler decides, epoch 7, boot {second}",
    ]
    assert first != second

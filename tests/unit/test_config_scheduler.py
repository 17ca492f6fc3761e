"""The scheduler's settings: what is taken, what is refused, and that the refusal names the key."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from config_kit import with_key

from kvmoverd import config_scheduler
from kvmoverd.config_scheduler import SchedulerFile
from kvmoverd.core.errors import ConfigError
from kvmoverd.core.scheduling.joint_settings import BOUNDS, JointSettings
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.state import Model
from kvmoverd.toml_table import Address

CONFIGS = Path(__file__).resolve().parents[2] / "config"
MINIMAL = """
[[models]]
name = "m"
kv_bytes_per_token = 40016
alpha_tokens = 3750000
beta_tokens = 800000
"""
RATES = {"name": "m", "kv_bytes_per_token": 40_000, "storage_rate": "40GiB", "gpu_tokens_per_s": 160_000}


def changed(path: str, value: object) -> SchedulerFile:
    """The minimal config with one key changed: `limits.waits_max`, or `models.0.name`; None takes it away."""
    return config_scheduler.parse(with_key(MINIMAL, path, value), Path("/etc/kvmoverd"))


def test_models_are_enough() -> None:
    found = config_scheduler.parse(tomllib.loads(MINIMAL), Path("/etc/kvmoverd"))
    assert found.models == (Model("m", 40_016, 3_750_000, 800_000),)
    assert found.limits == Limits()
    assert found.scheduler.listen == Address("0.0.0.0", 9402)
    assert (found.scheduler.report_interval_s, found.scheduler.pull_interval_s) == (0.2, 0.02)
    assert found.scheduler.journal.path is None
    assert found.metrics.listen is None
    assert found.joint == JointSettings()


def test_alpha_and_beta_come_from_rates() -> None:
    found = changed("models", [RATES])
    assert found.models == (
        Model.of("m", kv_bytes_per_token=40_000, snic_bytes_per_s=40 << 30, gpu_tokens_per_s=160_000),
    )


def test_every_limit_of_the_core_is_a_key_with_its_unit() -> None:
    for item in fields(Limits):
        if item.name.endswith("_ns"):
            found = changed(f"limits.{item.name.removesuffix('_ns')}", "1500ms")
            assert getattr(found.limits, item.name) == 1_500_000_000
        else:
            assert getattr(changed(f"limits.{item.name}", 77).limits, item.name) == 77
    assert changed("limits.waits_max", 5).waits_max == 5


def test_every_setting_of_the_joint_policy_is_a_key() -> None:
    for name, (least, most) in BOUNDS.items():
        if name.endswith("_ns"):
            found = changed(f"joint.{name.removesuffix('_ns')}", f"{most / 1e9:g}s")
        else:
            found = changed(f"joint.{name}", type(getattr(JointSettings(), name))(least))
        assert getattr(found.joint, name) == (most if name.endswith("_ns") else least)


def test_the_journals_path_starts_at_the_files_directory() -> None:
    found = changed("scheduler.journal", {"path": "logs/decisions", "bytes_max": "2MiB"})
    assert found.scheduler.journal.path == Path("/etc/kvmoverd/logs/decisions")
    assert found.scheduler.journal.bytes_max == 2 << 20


def test_tenants_have_weights_by_name() -> None:
    assert changed("tenants", {"a b": 2, "": 0.5}).joint.weights == (("a b", 2.0), ("", 0.5))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("models", None, "models is missing and has no default"),
        ("models", [RATES, RATES], "models[1].name is 'm', which another model has too"),
        ("models.0.name", "", "models[0].name is '', must be 1 to 256 characters"),
        ("models.0.kv_bytes_per_token", 0, "models[0].kv_bytes_per_token is 0B, must be 1B to 4GiB"),
        ("models.0.alpha_tokens", 0, "models[0].alpha_tokens is 0, must be 1 to 1,099,511,627,776"),
        ("models.0.beta_tokens", None, "models[0].beta_tokens is missing and has no default"),
        ("models.0.storage_rate", "1GiB", "models[0].storage_rate stands beside alpha_tokens and beta_tokens"),
        ("models", [{**RATES, "storage_rate": "1B"}], "models[0].storage_rate: model 'm': alpha_tokens is 0"),
        ("models", [{**RATES, "gpu_tokens_per_s": 0}], "models[0].gpu_tokens_per_s is 0, must be 1 to"),
        ("models", [{"name": "m", "kv_bytes_per_token": 1}], "models[0].storage_rate is missing and has no default"),
        ("scheduler.listen", "9402", "scheduler.listen is '9402', must be HOST:PORT with a port of 0 to 65535"),
        ("scheduler.advertise", "node:0", "scheduler.advertise is 'node:0', must be HOST:PORT with a port of 1"),
        ("scheduler.advertise", "[::]:9402", "scheduler.advertise is [::]:9402, which no daemon can dial"),
        ("scheduler.policy", "best", "scheduler.policy is 'best', must be one of "),
        ("scheduler.report_interval", "1ms", "scheduler.report_interval is 1ms, must be 10ms to 60s"),
        ("scheduler.report_interval", "501ms", "must be at most a quarter of limits.node_silent, which is 2s"),
        ("scheduler.pull_interval", "2s", "must be at most a quarter of limits.group_silent, which is 5s"),
        ("scheduler.pulls_per_s", 0, "scheduler.pulls_per_s is 0, must be 1 to 1,000,000"),
        ("scheduler.reports_per_s", True, "scheduler.reports_per_s is a boolean"),
        ("scheduler.journal.bytes_max", "1KiB", "scheduler.journal.bytes_max is 1KiB, must be 1MiB to 1024TiB"),
        ("scheduler.journal.queue_max", 0, "scheduler.journal.queue_max is 0, must be 4 to 16,777,216"),
        ("scheduler.journal.file", "x", "scheduler.journal.file is unknown; known here: "),
        ("limits.waiting_max", 0, "limits.waiting_max is 0, must be 1 to "),
        ("limits.wait_max", 600, "limits.wait_max is an integer (600), must be a number and a unit in quotes"),
        ("limits.group_silent", "0s", "limits.group_silent is 0ms, must be 1ms to 86400s"),
        ("limits.waits_max", 1 << 21, "limits.waits_max is 2,097,152, must be 1 to 1,048,576"),
        ("limits.wait_max_ns", 1, "limits.wait_max_ns is unknown"),
        ("joint.floor", "11s", "joint.floor is 11s, must be 0ms to 10s"),
        ("joint.helpers_max", 9, "joint.helpers_max is 9, must be 0 to 8"),
        ("joint.decode_level", 0.5, "joint.decode_level is 0.5, must be 1 to 100"),
        ("joint.weights", [], "joint.weights is unknown"),
        ("tenants.a", 0, "tenants.a is 0, must be 0.001 to 1000"),
        ("tenants", {"n" * 257: 1}, "joint.weight of tenant"),
        ("metrics.listen", "here", "metrics.listen is 'here', must be HOST:PORT"),
        ("shutdown.drain", "2h", "shutdown.drain is 7200s, must be 0ms to 3600s"),
        ("log.level", "loud", "log.level is 'loud', must be one of"),
        ("node.name", "a", "node is unknown; known here: "),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_bounds(path: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        changed(path, value)


def test_the_file_that_explains_every_key_has_all_of_them_with_their_defaults() -> None:
    text = (CONFIGS / "scheduler.toml").read_text()
    found = config_scheduler.load(CONFIGS / "scheduler.toml", {})
    plain = config_scheduler.parse(tomllib.loads(MINIMAL), CONFIGS)
    assert (found.limits, found.joint) == (plain.limits, plain.joint)
    assert found.scheduler == plain.scheduler
    assert (found.waits_max, found.metrics, found.log, found.shutdown) == (
        plain.waits_max,
        plain.metrics,
        plain.log,
        plain.shutdown,
    )
    shown: Any = plain.describe()
    for section in ("scheduler", "limits", "joint", "metrics", "log", "shutdown"):
        for key in shown[section]:
            assert re.search(rf"^(\[[a-z.]*\b{key}\b|{key} =)", text, re.MULTILINE), f"{section}.{key}"


def test_the_environment_beats_the_files_log_level(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text(MINIMAL)
    assert config_scheduler.load(path, {"KVMOVERD_LOG": "DEBUG"}).log.level == "debug"


def test_what_would_run_is_told_as_the_file_has_it() -> None:
    shown: Any = changed("metrics.listen", "127.0.0.1:0").describe()
    json.dumps(shown)
    assert shown["scheduler"]["pull_interval"] == "20ms"
    assert shown["limits"]["group_silent"] == "5s"
    assert shown["limits"]["waits_max"] == 16_384
    assert shown["models"][0]["alpha_tokens"] == 3_750_000
    assert shown["metrics"]["listen"] == "127.0.0.1:0"

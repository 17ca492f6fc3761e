"""The demo with a scheduler, without its processes: configs that are taken, what they say, and what is printed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvmoverd import config, config_scheduler, demo_scheduled
from kvmoverd.core.errors import ConfigError
from kvmoverd.demo_nodes import Node, NodeSettings, Service, node_config
from kvmoverd.demo_scheduled import ScheduledOptions, scheduler_config
from kvmoverd.demo_scheduled_table import compared, line_of, table

MIB = 1 << 20


def options(**more: Any) -> ScheduledOptions:
    given: dict[str, Any] = {
        "layers": 4,
        "agents": 6,
        "turns": 2,
        "seed": 0,
        "trace": None,
        "transport": "tcp",
        "pool": "192MiB",
        "read_rate": "12MiB",
        "json": False,
    }
    return ScheduledOptions(**given | more)


def act(**more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "requests": 4,
        "done": 4,
        "storage_read_bytes": {"prefill-0": 3_000_000, "decode-0": 1_000_000},
        "snic_max_over_avg": 1.25,
        "snic_max_over_avg_whole": 1.5,
        "ttft_ms": {"mean": 1500.0, "p50": 1000.0, "p99": 2500.0},
        "by_rule": {"a/b/c": 3, "d/e/f": 1},
        "verified_bytes": 1000,
        "errors": [],
        "seconds": 12.34,
    }
    return found | more


@pytest.mark.parametrize("policy", ["joint", "paper", "round-robin", "prefill-only"])
def test_the_scheduler_takes_its_config(tmp_path: Path, policy: str) -> None:
    service = Service("scheduler", tmp_path, 4321, "scheduler")
    service.config.write_text(scheduler_config(service, options(), policy))
    loaded = config_scheduler.load(service.config)
    (model,) = loaded.models
    assert (str(loaded.scheduler.listen), loaded.scheduler.policy) == ("127.0.0.1:4321", policy)
    assert model.kv_bytes_per_token == 4 * 656
    assert model.alpha_tokens == pytest.approx(3 * 12 * MIB / (4 * 656), abs=3), "3 s of one node's storage"


def test_storage_without_a_bound_has_a_model_all_the_same(tmp_path: Path) -> None:
    service = Service("scheduler", tmp_path, 4321, "scheduler")
    service.config.write_text(scheduler_config(service, options(read_rate="0B"), "joint"))
    assert config_scheduler.load(service.config).models[0].alpha_tokens > 0


def test_nodes_take_their_configs_and_know_the_scheduler(tmp_path: Path) -> None:
    nodes = [Node("p", tmp_path, 4322, share="read_bytes"), Node("d", tmp_path, 4323, share="de_buffer_bytes")]
    settings = NodeSettings("192MiB", "6MiB", own_share=0.55, other_share=0.15, scheduler="127.0.0.1:4321")
    for node in nodes:
        node.config.write_text(node_config(node, nodes, settings))
        config.load(node.config)
    found = tomllib.loads(nodes[1].config.read_text())
    assert found["scheduler"] == {"addresses": ["127.0.0.1:4321"]}
    assert found["pool"]["de_buffer_bytes"] > found["pool"]["read_bytes"] == found["pool"]["help_bytes"]
    assert [peer["name"] for peer in found["peers"]] == ["p"]
    assert found["storage"][0]["ops_max"] == 6, "as many as 6 MiB a second get through in time"


@pytest.mark.parametrize(("rate", "ops"), [("0B", 64), ("1GiB", 64), ("64MiB", 64), ("12MiB", 12), ("512KiB", 1)])
def test_slow_storage_gets_fewer_reads_at_once(rate: str, ops: int) -> None:
    assert NodeSettings("64MiB", rate).ops_max == ops


def test_a_rate_that_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="read_rate_max"):
        _ = NodeSettings("64MiB", "fast").ops_max


def test_the_baseline_is_played_once() -> None:
    assert options().policies == ("joint", "round-robin")
    assert options(policy="paper").policies == ("paper", "round-robin")
    assert options(policy="round-robin").policies == (demo_scheduled.BASELINE,)


def test_the_summary_has_the_fixed_names() -> None:
    found = compared({"joint": act(), "round-robin": act(snic_max_over_avg=1.6, errors=["x"])}, "joint", "round-robin")
    assert (found["snic_max_over_avg"], found["snic_max_over_avg_round_robin"]) == (1.25, 1.6)
    assert found["policies"]["joint"]["by_rule"] == {"a/b/c": 3, "d/e/f": 1}
    assert (found["verified_bytes"], found["errors"], found["seconds"]) == (2000, ["x"], 24.68)


def test_a_baseline_that_was_not_played_is_null() -> None:
    assert compared({"joint": act(errors=["x"])}, "joint", "round-robin")["snic_max_over_avg_round_robin"] is None


def test_the_table_has_a_row_a_policy_and_says_what_was_read_and_why() -> None:
    words = table({"joint": act(), "round-robin": act(done=3, snic_max_over_avg=1.6)}, 12 * MIB).splitlines()
    assert words[2].split() == ["joint", "4", "of", "4", "4.0", "1.250", "1.500", "1.50", "2.50", "12.3"]
    assert words[3].split()[:5] == ["round-robin", "3", "of", "4", "4.0"]
    assert "joint, read from storage, of 12.6 MB/s each: prefill-0 3.0 MB, decode-0 1.0 MB" in words
    assert "joint, assignments by why (prefill/decode/path): a/b/c 3, d/e/f 1" in words
    assert words[-1] == "errors: 0; every byte was right"


def test_errors_are_shown_and_only_the_first_ones() -> None:
    words = table({"joint": act(errors=[f"e{number}" for number in range(30)])}, 0).splitlines()
    assert "errors: 30; FAILED" in words and words[-1] == "  e19"


def test_a_turn_is_a_line_and_so_is_a_message() -> None:
    assert line_of("joint", {"message": "begins"}) == "joint: begins"
    event = {"session": "s", "turn": 3, "hit_tokens": 64, "bytes": 1e6, "ready_ms": 1500.0, "seconds": 2.0}
    line = line_of("joint", event | {"verified_bytes": 2e6, "errors": ["wrong"]})
    assert "turn  3  hit     64 tokens" in line and "all layers   1.50 s" in line and line.endswith("ERROR ['wrong']")

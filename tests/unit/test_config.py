"""The settings: what is taken, what is refused, and that the refusal names the key."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from config_kit import with_key

from kvmoverd import config
from kvmoverd.adapters.storage.segments.settings import Limit, SegmentSettings
from kvmoverd.core.errors import ConfigError
from kvmoverd.toml_table import Address, duration_text, size_text

CONFIGS = Path(__file__).resolve().parents[2] / "config"
MINIMAL = """
node.name = "a"
pool.bytes = "1GiB"
[[storage]]
name = "disk"
path = "blocks"
"""


def parsed(text: str = "", base: Path = Path("/etc/kvmoverd")) -> config.Config:
    return config.parse(tomllib.loads(MINIMAL + text), base)


def changed(path: str, value: object) -> config.Config:
    """The minimal config with one key changed: `pool.bytes`, or `storage.0.name`."""
    return config.parse(with_key(MINIMAL, path, value), Path("/etc/kvmoverd"))


def test_a_short_file_is_enough() -> None:
    found = parsed()
    assert found.node.name == "a"
    assert found.engine_api.socket == Path(config.DEFAULT_SOCKET)
    assert found.engine_api.mode == 0o660
    assert found.node_api.listen == Address("0.0.0.0", 9401)
    assert found.pool.limits_bytes <= found.pool.bytes == 1 << 30
    (root,) = found.storage
    assert (root.kind, root.path, root.role) == ("auto", Path("/etc/kvmoverd/blocks"), "main")
    assert found.requests.timeout_default_s == 60.0
    assert dict(found.peers) == {}
    assert (found.scheduler.addresses, found.scheduler.timeout_s) == ((), 2.0)


def test_values_come_in_with_their_units() -> None:
    found = parsed("""
[transport]
io_timeout = "1.5s"
listen = "[::1]:0"
[requests]
admission_wait = "250ms"
timeout_max = "5m"
[[peers]]
name = "b"
address = "[fe80::1]:9401"
""")
    assert found.transport.io_timeout_s == 1.5
    assert found.transport.listen == ("::1", 0)
    assert str(found.transport.listen) == "[::1]:0"
    assert found.requests.admission_wait_s == 0.25
    assert found.requests.timeout_max_s == 300.0
    assert found.peers["b"] == "[fe80::1]:9401"
    assert changed("pool.bytes", 1 << 30).pool == changed("pool.bytes", "1024 MiB").pool


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("node.name", None, "node.name is missing"),
        ("node.name", "two words", "node.name is 'two words', must be 1 to 128 letters"),
        ("node.nam", "a", "node.nam is unknown; known here: name"),
        ("pol", {}, "pol is unknown"),
        ("pool", 3, "pool is an integer (3), must be a table"),
        ("pool.bytes", None, "pool.bytes is missing"),
        ("pool.bytes", True, "pool.bytes is a boolean"),
        ("pool.bytes", 1.5e9, "pool.bytes is a decimal number"),
        ("pool.bytes", "1GB", "pool.bytes is '1GB', must be a number and a unit in quotes: B, KiB, MiB, GiB, TiB"),
        ("pool.bytes", "-1GiB", "pool.bytes is '-1GiB'"),
        ("pool.bytes", "32MiB", "pool.bytes is 32MiB, must be 64MiB to 64TiB"),
        ("pool.bytes", "65TiB", "pool.bytes is 65TiB"),
        (
            "pool.bytes",
            "100MiB",
            "pool.bytes is 100MiB, must be a multiple of pool.piece_bytes, 64MiB: 64MiB or 128MiB",
        ),
        (
            "pool.piece_bytes",
            "3MiB",
            "pool.piece_bytes is 3MiB, must be a multiple of one huge page, 2MiB: 2MiB or 4MiB",
        ),
        ("pool.help_bytes", "2GiB", "pool.bytes is too small for its parts"),
        ("split.floor", "2", "split.floor is '2', must be a number and a unit in quotes"),
        ("split.floor", "2m", "split.floor is 120s, must be 0ms to 60s"),
        ("split.helpers_max", 9, "split.helpers_max is 9, must be 0 to 8"),
        ("split.helper_nodes", ["a b"], "split.helper_nodes[0] is 'a b', must be 1 to 128 letters"),
        ("split.helps", 1, "split.helps is an integer (1), must be true or false"),
        ("split.stall", "10ms", "split.stall is 10ms, must be 50ms to 60s"),
        ("split.rebalances", "no", "split.rebalances is text ('no'), must be true or false"),
        ("split.ratio", 1, "split.ratio is unknown"),
        ("pool.leases_max", 0, "pool.leases_max is 0, must be 1 to 16,777,216"),
        ("engine_api.mode", 660, "engine_api.mode is an integer (660), must be text in quotes"),
        ("engine_api.mode", "0888", "engine_api.mode is '0888', must be octal permissions"),
        ("engine_api.mode", "0060", "engine_api.mode is '0060', must be octal permissions"),
        ("engine_api.socket", "x" * 200, "a Unix socket's path may have 97"),
        ("engine_api.socket", "", "engine_api.socket is '', must be a path"),
        ("node_api.listen", "localhost", "node_api.listen is 'localhost', must be HOST:PORT"),
        ("node_api.listen", "::1:9401", "node_api.listen is '::1:9401', must be HOST:PORT"),
        ("node_api.listen", "a:65536", "port of 0 to 65535"),
        ("node_api.advertise", "http://a", "node_api.advertise is 'http://a', must be a host name"),
        ("storage", [], "storage is missing: one [[storage]]"),
        ("storage", {}, "must be an array of tables: [[storage]]"),
        ("storage", [{}] * 9, "storage[8]: 9 are given, at most 8 can be used"),
        ("storage.0.path", None, "storage[0].path is missing"),
        (
            "storage.0.kind",
            "tape",
            'storage[0].kind is \'tape\', must be one of "auto", "usrbio", "uring", "threads", "memory", "null"',
        ),
        ("storage.0.direct", 1, "storage[0].direct is an integer (1), must be true or false"),
        ("storage.0.ops_max", 7, "storage[0].ops_max is 7, storage[0].threads is 16"),
        ("storage.0.size", 7, "storage[0].size is unknown"),
        ("storage.0.role", "backup", 'storage[0].role is \'backup\', must be one of "main", "copy"'),
        ("storage.0.role", "copy", 'none is "main": one of the 1 roots must be'),
        ("storage.0.layout", "b", 'storage[0].layout is \'b\', must be one of "auto", "segments", "files"'),
        ("storage.0.io_deadline", "1ms", "storage[0].io_deadline is 1ms, must be 100ms to 600s"),
        ("storage.0.segment_bytes", "1MB", "storage[0].segment_bytes is '1MB'"),
        ("storage.0.segment_bytes", (1 << 20) + 4096, "must be a multiple of 1MiB"),
        ("storage.0.high", "90%", "storage[0].high is text ('90%'), must be a decimal number"),
        ("storage.0.high", 90, "storage[0].high is 90, must be 0.01 to 0.99"),
        ("storage.0.low", 0.95, "storage[0].low is 0.95, must be below storage[0].high, 0.9"),
        ("storage.0.read_rate_max", "2TiB", "storage[0].read_rate_max is 2TiB, must be 0B to 1TiB"),
        (
            "storage.0.read_rate_max",
            "50MiB",
            "storage[0].read_rate_max is 50MiB a second: storage[0].ops_max, 64, reads of 4MiB take 5.1 s",
        ),
        ("storage.0.grace", "10s", "storage[0].grace is 10s, must be at least io_deadline and two polls, 10.4s"),
        ("storage.0.dead", "10s", "storage[0].dead is 10s, must be at least four heartbeats, 20s"),
        (
            "storage.0.bytes_max",
            "1GiB",
            "storage[0].bytes_max is 1073741824, must be 0B or at least 3 segments and two logs",
        ),
        ("storage.0.inodes_max", 15, "storage[0].inodes_max is 15, must be 0 or at least 16"),
        ("storage.0.limit", [{"tenant": "t"}], "storage[0].limit[0].bytes_max and storage[0].limit[0].ttl are missing"),
        ("storage.0.limit", [{"tenan": "t", "ttl": "1h"}], "storage[0].limit[0].tenan is unknown"),
        ("transport.kind", "udp", "transport.kind is 'udp'"),
        ("transport.dscp", 64, "transport.dscp is 64, must be 0 to 63"),
        ("transport.connections", 17, "transport.connections is 17, must be 1 to 16"),
        ("transport.local", "tcp", "transport.local is 'tcp'"),
        ("transport.so_priority", 7, "transport.so_priority is 7, must be 0 to 6"),
        ("transport.io_timeout", 10, "transport.io_timeout is an integer (10), must be a number and a unit"),
        ("transport.io_timeout", "10", "transport.io_timeout is '10'"),
        ("transport.io_timeout", "1ms", "transport.io_timeout is 1ms, must be 100ms to 600s"),
        ("requests.timeout_max", "2h", "requests.timeout_max is 7200s, must be 1s to 3600s"),
        ("requests.queue_max", "8", "requests.queue_max is text ('8'), must be an integer"),
        ("peers", [{"name": "b"}], "peers[0].address is missing"),
        ("peers", [{"name": "b", "address": "b:0"}], "peers[0].address is 'b:0'"),
        ("scheduler.addresses", "a:1", "scheduler.addresses is"),
        ("scheduler.addresses", ["a:1", "b"], "scheduler.addresses[1] is 'b', must be HOST:PORT"),
        ("scheduler.addresses", ["a:0"], "scheduler.addresses[0] is 'a:0', must be HOST:PORT with a port of 1"),
        ("scheduler.addresses", ["a:1", "a:1"], "scheduler.addresses has an entry twice"),
        ("scheduler.addresses", [f"a:{port}" for port in range(1, 18)], "must be an array of at most 16"),
        ("scheduler.timeout", "10ms", "scheduler.timeout is"),
        ("scheduler.boot", "x", "scheduler.boot is unknown"),
        ("log.level", "loud", "log.level is 'loud', must be one of \"debug\""),
        ("log.format", "xml", "log.format is 'xml'"),
        ("shutdown.drain", "1d", "shutdown.drain is '1d'"),
    ],
)
def test_a_bad_value_is_refused_with_its_key(path: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        changed(path, value)
    assert words in str(refusal.value)


def test_a_pool_that_is_too_small_shows_the_addition() -> None:
    with pytest.raises(ConfigError) as refusal:
        changed(
            "pool", {"bytes": "1GiB", "read_bytes": "1GiB", "de_buffer_bytes": "512MiB", "write_back_bytes": "1MiB"}
        )
    assert str(refusal.value) == (
        "pool.bytes is too small for its parts: read_bytes 1GiB + de_buffer_bytes 512MiB + write_back_bytes 1MiB "
        "+ help_bytes 0B = 1537MiB of 1GiB"
    )


@pytest.mark.parametrize("pool_mib", [2, 4, 10, 512, 2048, 81_920])
def test_the_default_parts_fit_in_every_pool(pool_mib: int) -> None:
    pool = changed("pool", {"bytes": f"{pool_mib}MiB", "piece_bytes": "2MiB"}).pool
    assert 0 < pool.write_back_bytes < pool.read_bytes == pool.de_buffer_bytes
    assert 0.8 * pool.bytes < pool.limits_bytes <= 0.95 * pool.bytes
    assert 0 < pool.help_bytes <= pool.write_back_bytes // 2
    assert 0 < pool.prefetch_bytes <= pool.write_back_bytes
    assert pool.limits_bytes + pool.prefetch_bytes <= pool.bytes


def test_a_pool_whose_parts_are_all_of_it_helps_nobody_and_takes_no_hints() -> None:
    pool = changed(
        "pool", {"bytes": "1GiB", "read_bytes": "512MiB", "de_buffer_bytes": "448MiB", "write_back_bytes": "64MiB"}
    )
    assert (pool.pool.help_bytes, pool.pool.prefetch_bytes) == (0, 0)


def test_hints_get_no_more_than_what_only_caches() -> None:
    text = re.escape("pool.prefetch_bytes is 512MiB, must be at most what only caches")
    with pytest.raises(ConfigError, match=text):
        changed("pool", {"bytes": "1GiB", "prefetch_bytes": "512MiB"})
    assert (
        changed("pool", {"bytes": "1GiB", "help_bytes": 0, "prefetch_bytes": "100MiB"}).pool.prefetch_bytes == 100 << 20
    )


def test_who_may_help_is_a_peer() -> None:
    peers = [{"name": "b", "address": "b:1"}]
    with pytest.raises(ConfigError, match=re.escape("split.helper_nodes[1] is 'c', which none of the 1 [[peers]] has")):
        config.parse(
            tomllib.loads(MINIMAL)
            | {"peers": peers, "split": {"helper_nodes": ["b", "c"]}, "transport": {"kind": "shm"}},
            Path("/etc"),
        )


def test_a_short_timeout_max_shortens_the_defaults() -> None:
    requests = changed("requests", {"timeout_max": "5s"}).requests
    assert {requests.timeout_default_s, requests.admission_wait_s, requests.attach_timeout_s} == {5.0}


def test_schedulers_are_named_by_address() -> None:
    found = parsed('[scheduler]\naddresses = ["s1:9402", "[fe80::1]:9402"]\ntimeout = "300ms"')
    assert (found.scheduler.addresses, found.scheduler.timeout_s) == (("s1:9402", "[fe80::1]:9402"), 0.3)


def test_two_peers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("peers[1].name is 'b', which another peer has too")):
        changed("peers", [{"name": "b", "address": "b:1"}, {"name": "b", "address": "c:1"}])


def test_peers_need_a_host_that_they_can_dial() -> None:
    peers = '[[peers]]\nname = "b"\naddress = "b:9401"\n'
    with pytest.raises(ConfigError, match=r"node_api\.advertise is missing: transport\.listen is 0\.0\.0\.0:0"):
        parsed(peers)
    found = parsed(peers + '[node_api]\nadvertise = "fe80::7"\n')
    assert found.data_endpoint("0.0.0.0:4711") == "[fe80::7]:4711"
    assert parsed(peers + '[transport]\nlisten = "10.0.0.1:0"\n').data_endpoint("10.0.0.1:5") == "10.0.0.1:5"
    shm = parsed(peers + '[node_api]\nadvertise = "x"\n[transport]\nkind = "shm"\n')
    assert shm.data_endpoint("unix:/run/a") == "unix:/run/a"


TWO_ROOTS: list[dict[str, Any]] = [
    {"name": "near", "path": "/nvme", "role": "copy", "kind": "uring"},
    {"name": "far", "path": "/3fs", "kind": "usrbio", "layout": "segments", "limit": [{"tenant": "t", "ttl": "1h"}]},
]


def test_several_roots_are_read_in_the_order_of_the_file() -> None:
    near, far = changed("storage", TWO_ROOTS).storage
    assert (near.name, near.role, far.name, far.role) == ("near", "copy", "far", "main")
    assert far.segments.limits == (Limit(tenant="t", ttl_s=3600.0),)
    assert far.segments.segment_bytes == SegmentSettings().segment_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"role": "main"}, 'storage[0].role and storage[1].role are "main": one of the 2 roots must be'),
        ({"name": "far"}, "storage[0].name is 'far', which another root has too"),
        ({"path": "/3fs/."}, "storage[0].path is '/3fs', which another root has too"),
        ({"path": "/3fs/a/b"}, "storage[0].path is '/3fs/a/b', inside that of root"),
    ],
)
def test_roots_that_get_in_each_others_way_are_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        changed("storage", [TWO_ROOTS[0] | changes, TWO_ROOTS[1]])
    assert words in str(refusal.value)


def test_every_setting_of_a_segment_store_is_a_key_of_its_name() -> None:
    (told,) = parsed().describe()["storage"]  # type: ignore[misc]
    ours = {name.removesuffix("_s") if not name.endswith("_per_s") else name for name in SegmentSettings.__slots__}
    assert ours - {"limits"} <= set(told)
    assert (told["high"], told["unlink_bytes_per_s"], told["commit_wait"]) == (0.9, "4GiB", "20ms")


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(MINIMAL + '[engine_api]\nsocket = "../run/a.sock"\n')
    found = config.load(tmp_path / "a.toml", {})
    assert found.storage[0].path == tmp_path / "blocks"
    assert found.engine_api.socket == tmp_path.parent / "run" / "a.sock"


def test_the_environment_beats_the_log_level_only(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(MINIMAL + '[log]\nlevel = "error"\nformat = "json"\n')
    found = config.load(tmp_path / "a.toml", {"KVMOVERD_LOG": "DEBUG", "KVMOVERD_POOL_BYTES": "1"})
    assert (found.log.level, found.log.format) == ("debug", "json")
    with pytest.raises(ConfigError, match="KVMOVERD_LOG is 'loud', must be one of debug, info, warning, error"):
        config.load(tmp_path / "a.toml", {"KVMOVERD_LOG": "loud"})


@pytest.mark.parametrize("content", [b"[pool", b"\xff\xfe", b'a = "1"\na = "2"'])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.toml is no TOML: "):
        config.load(tmp_path / "a.toml", {})


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*b\.toml: No such file or directory"):
        config.load(tmp_path / "b.toml", {})


def test_describe_is_plain_and_follows_the_file() -> None:
    found = config.load(CONFIGS / "node.toml", {}).describe()
    again: Any = json.loads(json.dumps(found))
    assert again == found
    pool = again["pool"]
    assert (
        pool["sum"]
        == "read_bytes 16GiB + de_buffer_bytes 16GiB + write_back_bytes 4GiB + help_bytes 2GiB = 38GiB of 40GiB"
    )
    assert pool["cache only"] == "2GiB"
    assert "640 pieces of 26 slots = 16640 slots" in pool["DeepSeek-V3.2 (61 layers, 64 tokens)"]
    assert again["requests"]["timeout_max"] == "3600s"


def test_describe_says_the_lane_s_floor_as_the_file_does() -> None:
    told: Any = changed("transport", {"lane_floor": "200MiB"}).describe()
    assert told["transport"]["lane_floor"] == "200MiB"


def test_node_toml_has_every_key_with_its_default() -> None:
    text = (CONFIGS / "node.toml").read_text()
    written = tomllib.loads(text)
    defaults: Any = changed("pool", {"bytes": "40GiB"}).describe()
    mine: Any = config.load(CONFIGS / "node.toml", {}).describe()
    examples = {("node", "name"), ("node_api", "advertise"), ("storage", "name"), ("storage", "path")}
    (defaults["storage"],), (mine["storage"],) = defaults["storage"], mine["storage"]
    assert set(written["storage"][0]["limit"][0]) == set(mine["storage"]["limit"][0])
    defaults["storage"]["limit"] = mine["storage"]["limit"]
    for section in set(defaults) - {"peers"}:
        table = written[section][0] if section == "storage" else written[section]
        made_up = {"sum", "cache only", config.EXAMPLE_NAME} if section == "pool" else set()
        assert set(table) == set(defaults[section]) - made_up, section
        for key in table:
            if (section, key) not in examples and section != "pool":
                assert mine[section][key] == defaults[section][key], f"{section}.{key}"
    assert mine["pool"]["piece_bytes"] == defaults["pool"]["piece_bytes"]
    assert mine["pool"]["leases_max"] == defaults["pool"]["leases_max"]


@pytest.mark.parametrize("name", ["laptop.toml", "node.toml"])
def test_every_key_of_the_shipped_files_is_commented(name: str) -> None:
    lines = (CONFIGS / name).read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    bare = [lines[number] for number in keys if not lines[number - 1].startswith("# ")]
    assert len(keys) >= 10
    assert not bare


def test_laptop_toml_stays_beside_itself_and_on_this_machine() -> None:
    found = config.load(CONFIGS / "laptop.toml", {})
    for path in (found.engine_api.socket, found.transport.socket, found.storage[0].path):
        assert path.is_relative_to(CONFIGS / "run")
    assert found.node_api.listen.host == found.transport.listen.host == "127.0.0.1"
    assert found.storage[0].create
    assert found.pool.bytes == 512 << 20


def test_sizes_and_durations_read_back_as_they_were_written() -> None:
    assert [size_text(size) for size in (0, 1, 1023, 1 << 10, 3 << 30, 5 << 40)] == [
        "0B",
        "1B",
        "1023B",
        "1KiB",
        "3GiB",
        "5TiB",
    ]
    assert [duration_text(length) for length in (0.0, 0.25, 1.5, 3600.0)] == ["0ms", "250ms", "1.5s", "3600s"]

"""What stands in `config/fabric/`: the marks are those of the code, the tables those published, the figures of the docs true."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvmoverd.core.qos import KV_LANE
from tests.markers import needs_opensm

ROOT = Path(__file__).resolve().parents[2]
FABRIC = ROOT / "config" / "fabric"
DOCS = (ROOT / "docs" / "fabric.md").read_text()
OPTIONS = FABRIC / "opensm" / "opensm-qos.conf"

MODEL_DSCP = 26
MODEL_LANES = (0, 1, 3)
CREDIT_BYTES = 64
HIGH_LIMIT_UNIT_BYTES = 4096
MTU_BYTES = 4096
LINK_BYTES_PER_S = 400e9 / 8


def options() -> dict[str, str]:
    """Key and value of each line of OpenSM's options that is no comment."""
    lines = [line for line in OPTIONS.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(maxsplit=1) for line in lines)


def weights(table: str) -> dict[int, int]:
    """Weight of each lane, in units of 64 bytes."""
    return {int(lane): int(weight) for lane, weight in (entry.split(":") for entry in table.split(","))}


def low_share(high_limit: int) -> float:
    """What the low table gets of a link that the high one would fill: one packet after high_limit times 4,096 bytes."""
    return MTU_BYTES / (high_limit * HIGH_LIMIT_UNIT_BYTES + MTU_BYTES)


def printed(script: str, *arguments: str) -> list[str]:
    """The commands that a script would run."""
    command = [str(FABRIC / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return [line.removeprefix("+ ") for line in done.stdout.splitlines()]


def refusal(script: str, *arguments: str) -> str:
    command = [str(FABRIC / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    assert done.returncode and not done.stdout
    return done.stderr


def test_the_four_lanes_are_those_published() -> None:
    published = {
        "qos_max_vls": "4",
        "qos_high_limit": "240",
        "qos_vlarb_high": "0:192,1:192,2:0,3:192",
        "qos_vlarb_low": "0:192,1:192,2:64,3:192",
    }
    assert published.items() <= options().items()


def test_ports_run_as_many_lanes_as_the_tables_name() -> None:
    # OpenSM masks lanes with 2 ** (code - 1) - 1.
    mask = (1 << (int(options()["max_op_vls"]) - 1)) - 1
    lanes = {*weights(options()["qos_vlarb_high"]), *map(int, options()["qos_sl2vl"].split(","))}
    assert {lane & mask for lane in lanes} == lanes == set(range(int(options()["qos_max_vls"])))


def test_kv_has_a_lane_of_its_own_that_the_high_table_never_serves() -> None:
    lanes = [int(lane) for lane in options()["qos_sl2vl"].split(",")]
    high, low = weights(options()["qos_vlarb_high"]), weights(options()["qos_vlarb_low"])
    assert len(lanes) == 16
    kv = lanes[KV_LANE.service_level]
    assert kv == 2 and high[kv] == 0 and low[kv] > 0
    assert [lanes[level] for level in MODEL_LANES] == list(MODEL_LANES) and all(high[lane] for lane in MODEL_LANES)


def test_weights_are_whole_packets_of_4096_bytes() -> None:
    for table in ("qos_vlarb_high", "qos_vlarb_low"):
        assert all(weight * CREDIT_BYTES % MTU_BYTES == 0 for weight in weights(options()[table]).values())


def test_the_docs_say_what_the_tables_leave_for_kv() -> None:
    limit, low = int(options()["qos_high_limit"]), weights(options()["qos_vlarb_low"])
    alone = low_share(limit)
    shared = alone * low[2] / sum(low.values())
    for figure in (
        f"{limit * HIGH_LIMIT_UNIT_BYTES:,} bytes",
        f"{100 * (1 - alone):.3f} %",
        f"{100 * alone:.3f} %",
        f"{LINK_BYTES_PER_S * alone / 1e9:.2f} GB/s",
        f"{100 * shared:.3f} %",
        f"{LINK_BYTES_PER_S * shared / 1e9:.3f} GB/s",
    ):
        assert figure in DOCS, figure


def test_the_docs_have_the_right_figures_for_other_limits() -> None:
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) % \| ([\d.]+) GB/s \| ([\d.]+) % \|$", DOCS, re.MULTILINE)
    assert len(rows) >= 4
    for limit, share, rate, model in rows:
        assert f"{100 * low_share(int(limit)):.3f}" == share
        assert f"{100 * (1 - low_share(int(limit))):.3f}" == model
        assert f"{LINK_BYTES_PER_S * low_share(int(limit)) / 1e9:.2f}" == rate


def test_the_policy_gives_kv_its_level_and_the_rest_one_of_the_models() -> None:
    text = (FABRIC / "opensm" / "qos-policy.conf").read_text()
    levels = {name: int(level) for name, level in re.findall(r"name: (\w+)\n\s+use: [^\n]*\n\s+sl: (\d+)", text)}
    assert levels == {"DEFAULT": 0, "KV": KV_LANE.service_level}
    assert set(re.findall(r"qos-level-name: (\w+)", text)) <= set(levels)
    opened = re.findall(r"^\s*(qos-[\w-]+)$", text, re.MULTILINE)
    assert sorted(opened) == sorted(re.findall(r"^\s*end-(qos-[\w-]+)$", text, re.MULTILINE))


@needs_opensm
def test_opensm_takes_every_option(tmp_path: Path) -> None:
    written = tmp_path / "opensm.conf"
    command = ["opensm", "--config", str(OPTIONS), "--create-config", str(written), "--log_file", str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    assert "Unrecognized" not in done.stdout
    taken = dict(line.split(maxsplit=1) for line in written.read_text().splitlines() if re.match(r"\w+ \S", line))
    assert options().items() <= taken.items()


@pytest.mark.parametrize("script", ["roce/mlnx_qos.sh", "roce/dcb.sh", "tcp/tc.sh"])
def test_scripts_can_be_read_by_the_plainest_shell(script: str) -> None:
    assert (FABRIC / script).stat().st_mode & 0o111
    subprocess.run([shutil.which("dash") or "sh", "-n", str(FABRIC / script)], check=True, timeout=10)


def test_mlnx_qos_gives_kv_the_last_queue_and_the_model_a_strict_one() -> None:
    commands = printed("roce/mlnx_qos.sh", "-n", "ens1")
    said = " ".join(commands)
    assert all(command.startswith("mlnx_qos -i ens1 ") for command in commands)
    # The tool refuses these two together.
    assert not any("--trust" in command and "--dscp2prio" in command for command in commands)
    priority = {int(dscp): int(prio) for dscp, prio in re.findall(r"set,(\d+),(\d+)", said)}
    queue = [int(number) for number in value(said, "--prio_tc")]
    turns, shares = value(said, "--tsa"), [int(share) for share in value(said, "--tcbw")]
    pfc = value(said, "--pfc")
    kv, model = priority[KV_LANE.dscp], priority[MODEL_DSCP]
    assert queue[kv] == 0 and queue.count(0) == 1 and turns[queue[model]] == "strict"
    assert sum(shares) == 100 and shares[queue[kv]] == min(share for share in shares if share)
    assert [prio for prio in range(8) if pfc[prio] == "1"] == sorted([kv, model])


def value(said: str, option: str) -> list[str]:
    found = re.search(rf"{option} (\S+)", said)
    assert found
    return found[1].split(",")


def pairs(said: str, option: str, end: str) -> dict[str, str]:
    """`a:b` of one array of dcb, from its name to the next."""
    return dict(entry.split(":") for entry in said.split(f"{option} ")[1].split(end, maxsplit=1)[0].split())


@pytest.mark.parametrize("floor", [(), ("-f", "5")])
def test_dcb_and_mlnx_qos_say_the_same(floor: tuple[str, ...]) -> None:
    theirs = " ".join(printed("roce/mlnx_qos.sh", "-n", *floor, "ens1"))
    commands = printed("roce/dcb.sh", "-n", *floor, "ens1")
    app, ets, pfc = commands[1:]
    assert pairs(app, "dscp-prio", "\n") == dict(re.findall(r"set,(\d+),(\d+)", theirs))
    assert list(pairs(ets, "prio-tc", " tc-tsa").values()) == value(theirs, "--prio_tc")
    for option, end, other in (("tc-tsa", " tc-bw", "--tsa"), ("tc-bw", "\n", "--tcbw")):
        given = pairs(ets, option, end)
        assert [given.get(str(queue), given["all"]) for queue in range(8)] == value(theirs, other)
    on = pairs(pfc, "prio-pfc", "\n")
    assert [{"on": "1", "off": "0"}[on.get(str(prio), on["all"])] for prio in range(8)] == value(theirs, "--pfc")


def test_a_floor_for_kv_takes_the_models_strictness_and_adds_up_to_100() -> None:
    for percent in (1, 49):
        said = " ".join(printed("roce/mlnx_qos.sh", "-n", "-f", str(percent), "ens1"))
        shares = [int(share) for share in value(said, "--tcbw")]
        turns = value(said, "--tsa")
        assert sum(shares) == 100 and shares[0] == percent
        assert all((turn == "ets") == (share > 0) for turn, share in zip(turns, shares, strict=True))


@pytest.mark.parametrize("script", ["roce/mlnx_qos.sh", "roce/dcb.sh"])
def test_what_a_profile_sets_it_can_take_back(script: str) -> None:
    undone = " ".join(printed(script, "-n", "ens1", "undo"))
    assert "vendor" in undone and ("--trust pcp" in undone or "app del" in undone)
    assert re.search(r"--pfc 0(,0){7}|prio-pfc all:off", undone)


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("roce/mlnx_qos.sh", ("-n", "-f", "50", "ens1"), "1 to 49"),
        ("roce/dcb.sh", ("-n", "-f", "0", "ens1"), "1 to 49"),
        ("roce/dcb.sh", ("none-such",), "no interface none-such"),
        ("roce/mlnx_qos.sh", ("none-such",), "no interface none-such"),
        ("tcp/tc.sh", ("none-such", "10mbit"), "no interface none-such"),
        ("tcp/tc.sh", ("-n", "ens1", "10"), "tc.sh [-n] DEV RATE"),
        ("tcp/tc.sh", ("-n", "ens1", "800kbit"), "1mbit or more"),
        ("tcp/tc.sh", ("-n", "ens1", "10mbit", "fq"), "tc.sh [-n] DEV RATE"),
        ("tcp/tc.sh", ("ens1",), "tc.sh [-n] DEV RATE"),
    ],
)
def test_what_makes_no_sense_is_refused(script: str, arguments: tuple[str, ...], words: str) -> None:
    assert words in refusal(script, *arguments)


@pytest.mark.parametrize("kind", ["prio", "ets", "htb"])
def test_tc_puts_the_model_first_and_kv_last_in_both_families(kind: str) -> None:
    commands = printed("tcp/tc.sh", "-n", "ens1", "40mbit", kind)
    filters = [re.search(r"(dsfield|priority) (0x\w+) 0xfc flowid \d+:(\d)", command) for command in commands]
    found = {(match[1], int(match[2], 16), match[3]) for match in filters if match}
    model = MODEL_DSCP << 2
    assert found == {
        (field, mark, place)
        for field in ("dsfield", "priority")
        for mark, place in ((model, "1"), (KV_LANE.traffic_class, "3"))
    }
    assert kind in " ".join(commands) and all("ens1" in command for command in commands)


def test_the_floors_of_htb_are_parts_of_the_rate() -> None:
    said = "\n".join(printed("tcp/tc.sh", "-n", "ens1", "40mbit", "htb"))
    assert re.findall(r"classid 1:[123] htb rate (\d+)kbit ceil (\w+) prio (\d)", said) == [
        ("39200", "40mbit", "0"),
        ("400", "40mbit", "1"),
        ("400", "40mbit", "7"),
    ]

"""What the parts that ran over real verbs found; `inside` has their commands. With -rP each prints its figures."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.rdma_vm.conftest import Results
from tests.rdma_vm.inside import LOCALS

# The first one waits for the VM.
pytestmark = pytest.mark.timeout(1700)
KINDS = ("verbs", "verbs-local")
"""Of transports in the contract suite: to a peer, and through a loopback queue pair to itself."""
KIND = re.compile(r"\[(verbs-local|verbs)[-\]]")


def last_json(said: str) -> Any:
    """What a program told as one JSON object or list on its last line, or as all it said."""
    line = said.strip().splitlines()[-1]
    return json.loads(line if line.startswith(("{", "[")) else said)


def test_the_contract_suite_of_transports_is_green_over_verbs(results: Results) -> None:
    said = results.output("contract")
    print(said.strip().splitlines()[-1])
    cases = list(ElementTree.parse(results.folder / "contract.xml").getroot().iter("testcase"))
    passed = Counter(kind_of(case.get("name", "")) for case in cases if not len(case))
    for kind in KINDS:
        print(f"{kind}: {passed[kind]} passed")
        assert passed[kind] >= 15, f"only {passed[kind]} tests of {kind} ran\n{said[-4000:]}"
    # The real thing is there: nothing has a reason to be left out for want of it.
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    assert len(skipped) < len(cases) / 10, skipped


def kind_of(name: str) -> str:
    """Which transport a test was of; empty where it was of a part of one.

    >>> kind_of("test_it[verbs-local-None]"), kind_of("test_it[verbs-1-2]"), kind_of("test_it")
    ('verbs-local', 'verbs', '')
    """
    found = KIND.search(name)
    return found[1] if found else ""


@pytest.mark.parametrize("local", LOCALS)
def test_two_nodes_move_a_trace_over_verbs_and_every_byte_is_right(results: Results, local: str) -> None:
    told = last_json(results.output(f"demo-{local}"))
    print(json.dumps(told))
    assert told["errors"] == [] and told["verified_bytes"] > 1 << 20
    assert all(path["hit_tokens"] > 0 for path in told["paths"].values()), "what was stored came by each path"


def test_three_nodes_read_one_request_and_a_helper_that_is_killed_writes_nothing_late(results: Results) -> None:
    told = last_json(results.output("helped"))
    print(json.dumps(told))
    assert told["wrong"] == {"parts": [], "auto": [], "killed": []} and told["late_bytes"] == 0
    assert told["read_blocks"] == {"pe": 4, "h0": 0, "de": 4}, "what lies in the helper's pool is sent and not read"
    assert told["sent_blocks"] == {"pe": 4.0, "de": 4.0}, "each block that the helper has goes to both"
    assert told["read_plans"].get("split", 0) + told["read_plans"].get("helped", 0) == 1, (
        "the nodes shared by themselves"
    )
    assert "failed" not in told["moved_before"] and told["moved_parts"]["failed"] == 1, "its part went to another node"
    assert sum(told["fences"]) > 0, "it was killed in the middle of a layer"


def test_packets_of_kv_bear_the_low_class_and_those_of_the_model_the_high_one(results: Results) -> None:
    print(results.output("capture"))


def test_a_strict_queue_protects_the_model_from_saturating_kv(results: Results) -> None:
    """The figures are printed; asserted is only what tells a lane from none, on a processor that is emulated and shared.

    With the lane off the model keeps some 0.57 of what it has alone, and its latency is fifo's.
    """
    said = results.output("qos")
    print(said)
    told = last_json(said)
    assert told["model_keeps"] >= 0.8 and told["latency_over_fifo"] <= 0.6


def test_the_doctor_finds_the_devices_and_a_remedy_for_what_is_amiss(results: Results) -> None:
    findings = last_json(results.output("doctor"))
    for finding in findings:
        assert finding["status"] in ("ok", "warn", "fail", "skip"), finding
        assert finding["remedy"] or finding["status"] in ("ok", "skip"), finding
        print(f"{finding['status']:4} {finding['check']}: {finding['found']}")
    assert any("rxe0" in json.dumps(finding) for finding in findings)


def test_a_class_that_the_system_gives_to_a_whole_device_is_found(results: Results) -> None:
    told = last_json(results.output("override"))
    print(json.dumps(told))
    assert told["before"] == told["after"] == "ok: rxe0:1: nothing forces a traffic class, ours is 32"
    assert told["with"].startswith("warn: rxe0:1: rdma_cm gives connections traffic class 104")
    assert told["other"].startswith("ok: rxe1:1"), "the other device has none"


def test_the_helper_posts_what_the_twin_posts_for_less(results: Results) -> None:
    told = last_json(results.output("posting"))
    print(json.dumps(told))
    assert 0 < told["helper_us_per_slice"] < told["pyverbs_us_per_slice"]

"""`kvmoverd demo` as a user runs it: what it prints, what it leaves behind, and what it says of wrong bytes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster import children_of, environment, running

from kvmover_client import ROOT, AsyncClient, RegionMemory, block_keys, paged_geometry
from kvmover_client.replay import kv, player, tokens, trace, traces_path

pytestmark = pytest.mark.e2e

RUN_S = 50.0
END_S = 10.0
LAYERS = 4
WRONG_LAYERS = 3
SMALL = ("--layers", str(LAYERS), "--pool", "64MiB")
TOKEN_BYTES = LAYERS * 656
PAGE_BYTES = 4096
PATH_NAMES = {"turns", "hit_tokens", "bytes", "gbytes_per_s", "first_layer_ms", "all_layers_ms"}


class Place:
    """A directory of temporary files of its own, so that what is left behind can be seen."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = environment() | {"TMPDIR": str(home)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvmoverd", "demo", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=self.environment)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=RUN_S)
            return process.returncode, out, err

    def segments(self) -> list[Path]:
        return list(self.home.rglob("*.seg"))


@pytest.fixture
def place() -> Iterator[Place]:
    home = Path(tempfile.mkdtemp(prefix="kvmdemo-", dir="/tmp"))
    try:
        yield Place(home)
        assert list(home.iterdir()) == [], "the demo left files behind"
        assert not list(Path("/dev/shm").glob("*kvmover*")), "the demo left shared memory behind"
    finally:
        shutil.rmtree(home)


def verified_bytes(sessions: int, turns: int, hit_tokens: int) -> int:
    """Each hit is checked once in the prefill engine, each prompt once in the decode engine."""
    played = trace.read_sessions(traces_path(), sessions_max=sessions, turns_max=turns)
    return TOKEN_BYTES * (hit_tokens + sum(turn.prompt_tokens for session in played for turn in session.turns))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_summary_has_the_fixed_names_and_all_paths_and_both_nodes_were_used(place: Place, transport: str) -> None:
    code, out, err = place.run(*SMALL, "--json", "--transport", transport)
    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert set(summary) == {"paths", "storage_read_bytes", "verified_bytes", "errors", "seconds"}
    assert set(summary["paths"]) == {"pe_read", "de_read", "auto", "auto_cold"}
    for path in summary["paths"].values():
        assert set(path) == PATH_NAMES and all(path.values()), path
        assert path["first_layer_ms"] <= path["all_layers_ms"]
        assert path["bytes"] == path["hit_tokens"] * TOKEN_BYTES
    assert set(summary["storage_read_bytes"]) == {"prefill-0", "decode-0"}
    assert all(summary["storage_read_bytes"].values()), summary
    cold_tokens = summary["paths"]["auto_cold"]["hit_tokens"]
    hit_tokens = sum(path["hit_tokens"] for path in summary["paths"].values()) - cold_tokens
    assert summary["verified_bytes"] == verified_bytes(3, 7, hit_tokens) + verified_bytes(3, 1, cold_tokens)
    assert summary["errors"] == [] and 0 < summary["seconds"] < RUN_S


def test_the_plain_run_shows_each_turn_and_a_table(place: Place) -> None:
    code, out, err = place.run(*SMALL, "--sessions", "2", "--turns", "2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("2 sessions, 4 turns of ")
    assert sum(" turn " in line for line in lines) == 4 + 2
    assert [line.split()[:2] for line in lines if line.startswith(("pe_read", "de_read", "auto"))] == [
        ["pe_read", "1"],
        ["de_read", "2"],
        ["auto", "1"],
        ["auto_cold", "2"],
    ]
    assert any(line.startswith("read from storage: prefill-0 ") for line in lines)
    assert any(line.startswith("plans, by who reads: ") and "decode " in line for line in lines)
    assert "errors: 0; every byte was right" in lines[-1]


def test_after_a_restart_the_pools_are_empty_and_both_nodes_read_each_prompt(place: Place) -> None:
    code, out, err = place.run("--layers", "16", "--pool", "256MiB", "--sessions", "2", "--turns", "1")
    assert (code, err) == (0, "")
    told = dict(line.split(": ", 1) for line in out.splitlines() if line.startswith(("cold, ", "all nodes ")))
    assert told["cold, plans, by who reads"] == "split 2"
    reads = [word.split() for word in told["cold, read from storage"].split(", ")]
    assert [node for node, *_ in reads] == ["prefill-0", "decode-0"] and all(float(size) > 0 for _, size, _ in reads)
    assert "one node's storage alone would read for " in told["cold, all layers of all turns"]


def test_further_nodes_start_and_every_byte_is_right(place: Place) -> None:
    code, out, err = place.run(*SMALL, "--sessions", "2", "--turns", "4", "--helpers", "2", "--json")
    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert set(summary["storage_read_bytes"]) == {"prefill-0", "decode-0", "helper-0", "helper-1"}
    assert summary["errors"] == [] and summary["paths"]["auto"]["hit_tokens"] > 0


def test_more_helpers_than_the_demo_starts_are_refused(place: Place) -> None:
    for wrong in ("9", "-1", "x", "12"):
        code, _, err = place.run("--helpers", wrong)
        assert code == 2 and "is no whole number from 0 to 8" in err


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        ('{"turns": [[1, 2]]}', "turns[0]"),
    ],
)
def test_a_trace_that_can_not_be_read_is_named(place: Place, tmp_path: Path, content: str | None, named: str) -> None:
    path = tmp_path / "own.jsonl"
    if content is not None:
        path.write_text(content)
    code, out, err = place.run(*SMALL, "--json", "--trace", str(path))
    assert (code, out) == (1, "")
    assert str(path) in err and named in err and "Traceback" not in err


def test_a_pool_that_is_too_small_for_a_prompt_fails_with_what_to_raise(place: Place) -> None:
    code, out, _ = place.run("--layers", "12", "--pool", "64MiB", "--sessions", "1", "--turns", "1")
    assert code == 1
    assert "pool.de_buffer_bytes" in out and "raise --pool" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_mid_run_ends_all_processes_within_seconds(place: Place, number: signal.Signals) -> None:
    with place.start("--layers", "16", "--pool", "256MiB") as process:
        assert process.stdout is not None
        while " turn " not in process.stdout.readline():
            assert process.poll() is None
        children = children_of(process.pid)
        assert len(children) == 3, "two daemons and the engines"
        process.send_signal(number)
        process.communicate(timeout=END_S)
    assert process.returncode == 130
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_a_demo_that_is_killed_takes_its_processes_along(place: Place) -> None:
    with place.start("--layers", "16", "--pool", "256MiB") as process:
        assert process.stdout is not None
        while " turn " not in process.stdout.readline():
            assert process.poll() is None
        children = children_of(process.pid)
        assert len(children) == 3, "two daemons and the engines"
        process.kill()
        process.communicate(timeout=END_S)
    until_s = time.monotonic() + END_S
    while alive := [pid for pid in children if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until_s, f"{alive} outlive the demo"
        time.sleep(0.05)
    for scratch in place.home.iterdir():
        assert not list(scratch.glob("*.sock*")), "the daemons stopped in order"
        shutil.rmtree(scratch)


def test_flipped_bits_in_every_stored_block_never_reach_an_engine(place: Place) -> None:
    """Blocks found broken are misses: recomputed, and reported as lost by the replay, which knew them stored."""
    with place.start(*SMALL, "--sessions", "1", "--turns", "4") as process:
        assert process.stdout is not None
        flipped, turns = set[tuple[Path, int]](), 0
        errors = []
        for line in process.stdout:
            assert "wrong bytes" not in line, line
            if " verified " in line:
                turns += 1
                for path in place.segments():
                    _flip(path, flipped)
            elif line.startswith("  trace_"):
                errors.append(line)
        process.wait(END_S)
    assert flipped and turns in (4, 5), "broken blocks that were known to be stored end it after the first act"
    assert process.returncode == bool(errors)
    assert all("CORRUPT" in error or "were found" in error for error in errors), errors


def _flip(path: Path, flipped: set[tuple[Path, int]]) -> None:
    """One bit in the payload of each record that had none flipped yet."""
    record_bytes = PAGE_BYTES - (-LAYERS * 64 * 656 // PAGE_BYTES * PAGE_BYTES)
    with path.open("r+b") as file:
        for at in range(PAGE_BYTES, path.stat().st_size, record_bytes):
            file.seek(at)
            if not any(file.read(64)):
                return
            if (path, at) not in flipped:
                flipped.add((path, at))
                file.seek(at + record_bytes // 2)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 4]))


async def test_one_wrong_byte_in_an_engine_s_pages_is_an_error_and_exit_code_1() -> None:
    """A block is stored whole and sound, under the replay's key, with one byte that is not what the replay expects."""
    with running() as cluster:
        await _store_first_block_wrong(cluster.pe.endpoint, seed=5)
        command = ["-m", "kvmover_client.replay", "--layers", str(WRONG_LAYERS), "--seed", "5"]
        command += ["--prefill", cluster.pe.endpoint, "--decode", cluster.de.endpoint, "--decode-node", "de"]
        command += ["--sessions", "1", "--turns", "1"]
        pipe = asyncio.subprocess.PIPE
        replay = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, env=environment())
        out, _ = await asyncio.wait_for(replay.communicate(), RUN_S)
        assert replay.returncode == 1
        errors = json.loads(out.splitlines()[-1])["errors"]
        assert any("prefill, layer 2: 1 wrong bytes, the first at token 7 byte 33" in error for error in errors), errors
        assert any("decode, layer 2: 1 wrong bytes, the first at token 7 byte 33" in error for error in errors), errors
        for node in cluster.nodes:
            await node.slots_home()


async def _store_first_block_wrong(endpoint: str, *, seed: int) -> None:
    manifest = player.manifest_of(WRONG_LAYERS)
    (session,) = trace.read_sessions(traces_path(), sessions_max=1, turns_max=1)
    said = next(tokens.conversation(session, seed)).all
    async with await AsyncClient.connect(endpoint) as client:
        model = await client.register_model(manifest)
        (key,) = block_keys(model.fingerprint, said[:64], 64)
        geometry = paged_geometry(manifest.layout, 1)
        with RegionMemory.create(geometry.size_bytes, "wrong") as memory:
            region = await client.register_region(memory, geometry, model)
            pattern = kv.KvPattern(layers=WRONG_LAYERS, token_bytes=656, page_tokens=64, model=model.fingerprint.hex())
            for layer in range(WRONG_LAYERS):
                rows = region.page_view(layer, 0, 0).reshape(64, 656)
                pattern.fill(rows, layer, kv.spans([0], 64, 0, 64), tokens.chain(said))
                rows[7, 33] ^= np.uint8(layer == 2)
                del rows
            call = await client.store_blocks("wrong", 1, model, [key], ROOT, 0, region, [0])
            await call.result()
            await call.end()

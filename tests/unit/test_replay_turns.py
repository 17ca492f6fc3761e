"""Turns and reports: when another attempt is made, what counts as an error, and how the sums come about."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from kvmover_client import BadPlan, DaemonGone, PoolExhausted
from kvmover_client.replay import turns
from kvmover_client.replay.__main__ import main
from kvmover_client.replay.engine import ERRORS_MAX, Checked
from kvmover_client.replay.engines import Decoded, DecodeEngine, Prefilled, PrefillEngine
from kvmover_client.replay.kv import Mismatch
from kvmover_client.replay.pages import OutOfPages
from kvmover_client.replay.report import Report, TurnPlayed
from kvmover_client.replay.request import AttemptFailed, ReadPath, Request
from kvmover_client.replay.tokens import chain
from kvmover_client.replay.turns import ATTEMPTS_MAX, Played, Stage
from kvmover_client.scheduling import ReadChoice

KEYS = [bytes([number]) * 32 for number in range(4)]
REQUEST = Request("r", KEYS, chain(np.zeros(256, dtype=np.uint32)), 200, 64)
RETRY = AttemptFailed("the peer went", retryable=True)


class _Scripted:
    """Both engines: one outcome an attempt, the last one again and again."""

    def __init__(self, *outcomes: Prefilled | Decoded | Exception) -> None:
        self.outcomes = list(outcomes)
        self.attempts: list[int] = []
        self.cancelled = 0
        self.waited_for: list[int] = []

    async def wait_found(self, keys: Sequence[bytes]) -> None:
        self.waited_for.append(len(keys))

    async def prefill(self, request: Request, attempt: int, decode_node: str, read: ReadChoice) -> object:
        return await self.decode(request, attempt)

    async def decode(self, request: Request, attempt: int) -> object:
        self.attempts.append(attempt)
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return outcome


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "RETRY_PAUSE_S", 0.0)


def _stage(prefill: _Scripted, decode: _Scripted, stored: Sequence[bytes] = ()) -> Stage:
    stage = Stage(cast(PrefillEngine, prefill), cast(DecodeEngine, decode), "d")
    stage.stored.add(stored)
    return stage


async def test_what_a_turn_stored_is_expected_of_the_next() -> None:
    prefill = _Scripted(Prefilled(found_blocks=1, hit_blocks=1))
    stage = _stage(prefill, _Scripted(Decoded(durable_keys=KEYS)))
    assert (await stage.play(REQUEST, ReadPath.PE)).errors == []
    (error,) = (await stage.play(REQUEST, ReadPath.PE)).errors
    assert error == "3 blocks of the prompt are stored, 1 were found and 1 loaded"
    assert prefill.waited_for == [0, 3], "what another node has stored is seen a little later"


async def test_fewer_blocks_loaded_than_found_is_an_error_that_says_which_was_lost() -> None:
    prefilled = Prefilled(found_blocks=3, hit_blocks=1, first_lost=": block 1 is lost, CORRUPT")
    (error,) = (await _stage(_Scripted(prefilled), _Scripted(Decoded()), KEYS).play(REQUEST, ReadPath.PE)).errors
    assert error == "3 blocks of the prompt are stored, 3 were found and 1 loaded: block 1 is lost, CORRUPT"


async def test_the_block_that_must_be_computed_is_not_missed() -> None:
    whole = Request("r", KEYS, chain(np.zeros(256, dtype=np.uint32)), 192, 64)
    stage = _stage(_Scripted(Prefilled(found_blocks=3, hit_blocks=2)), _Scripted(Decoded()), KEYS)
    assert (await stage.play(whole, ReadPath.PE)).errors == []


async def test_more_blocks_than_expected_are_no_error() -> None:
    stage = _stage(_Scripted(Prefilled(found_blocks=3, hit_blocks=3)), _Scripted(Decoded()), KEYS[:1])
    assert (await stage.play(REQUEST, ReadPath.PE)).errors == []


async def test_an_attempt_that_may_help_is_made_under_a_higher_number() -> None:
    prefill, decode = _Scripted(RETRY, PoolExhausted("no slots"), Prefilled()), _Scripted(Decoded(verified_bytes=7))
    played = await _stage(prefill, decode).play(REQUEST, ReadPath.PE)
    assert prefill.attempts == decode.attempts == [1, 2, 3]
    assert played.decoded == Decoded(verified_bytes=7)
    assert played.failures == ["attempt 1: the peer went", "attempt 2: no slots"]
    assert played.errors == []


async def test_when_one_engine_fails_the_other_is_cancelled() -> None:
    prefill, decode = _Scripted(Prefilled()), _Scripted(BadPlan("no such path"))
    played = await _stage(prefill, decode).play(REQUEST, ReadPath.PE)
    assert prefill.cancelled == 1
    assert not played.succeeded
    assert played.errors == ["attempt 1: no such path"]


@pytest.mark.parametrize("error", [BadPlan("refused"), DaemonGone("closed"), OutOfPages("none left")])
async def test_what_can_not_help_is_not_tried_again(error: Exception) -> None:
    prefill = _Scripted(error)
    assert not (await _stage(prefill, _Scripted(Decoded())).play(REQUEST, ReadPath.PE)).succeeded
    assert prefill.attempts == [1]


async def test_attempts_and_their_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = _Scripted(RETRY)
    assert len((await _stage(prefill, _Scripted(Decoded())).play(REQUEST, ReadPath.PE)).errors) == ATTEMPTS_MAX
    monkeypatch.setattr(turns, "ATTEMPT_S", 0.0)
    played = await _stage(_Scripted(Prefilled()), _Scripted(Decoded())).play(REQUEST, ReadPath.PE)
    assert played.errors == ["attempt 1: not over within 0 s"]


async def test_a_fault_of_the_replay_itself_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        await _stage(_Scripted(ZeroDivisionError()), _Scripted(Decoded())).play(REQUEST, ReadPath.PE)


def test_wrong_bytes_are_counted_in_full_and_told_in_part() -> None:
    seen = Checked()
    seen.add("layer 0", 100, Mismatch())
    for layer in range(1, 50):
        seen.add(f"layer {layer}", 100, Mismatch(3, token=7, byte=2))
    assert (seen.verified_bytes, seen.wrong_bytes, len(seen.errors)) == (5000, 147, ERRORS_MAX)
    assert seen.errors[0] == "layer 1: 3 wrong bytes, the first at token 7 byte 2"


NOTHING = {
    "turns": 0,
    "hit_tokens": 0,
    "bytes": 0,
    "gbytes_per_s": 0.0,
    "first_layer_ms": 0.0,
    "all_layers_ms": 0.0,
}


def _turn(path: ReadPath, prefilled: Prefilled | None, *errors: str) -> TurnPlayed:
    decoded = Decoded(verified_bytes=10, dropped_blocks=1) if prefilled else None
    return TurnPlayed("s", 3, path, 200, 64, Played(prefilled, decoded, 0.5, [], errors))


def test_rates_and_times_are_those_of_turns_that_hit_something() -> None:
    report = Report()
    report.add(_turn(ReadPath.PE, Prefilled()))
    for first_s, all_s in ((0.1, 0.5), (0.3, 1.5)):
        hit = Prefilled(verified_bytes=5, hit_blocks=2, loaded_bytes=10**9, first_layer_s=first_s, all_layers_s=all_s)
        report.add(_turn(ReadPath.PE, hit))
    report.add(_turn(ReadPath.DE, None, "lost"))
    assert report.summary(2.0) == {
        "paths": {
            "pe_read": {
                "turns": 3,
                "hit_tokens": 256,
                "bytes": 2 * 10**9,
                "gbytes_per_s": 1.0,
                "first_layer_ms": 200.0,
                "all_layers_ms": 1000.0,
            },
            "de_read": NOTHING | {"turns": 1},
            "auto": NOTHING,
        },
        "verified_bytes": 40,
        "dropped_blocks": 3,
        "failed_attempts": 0,
        "errors": ["s turn 3 (de_read): lost"],
        "seconds": 2.0,
    }


def test_errors_beyond_a_hundred_are_counted() -> None:
    report = Report()
    for _ in range(103):
        report.add(_turn(ReadPath.DE, None, "lost"))
    errors = cast(list[str], report.summary(1.0)["errors"])
    assert len(errors) == 101
    assert errors[-1] == "and 3 more errors"


def test_a_trace_that_can_not_be_read_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ["--prefill", "unix:///p", "--decode", "unix:///d", "--decode-node", "d"]
    assert main([*nodes, "--trace", "/nowhere/t.jsonl"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("replay: /nowhere/t.jsonl: ")
    assert said.err.count("\n") == 1

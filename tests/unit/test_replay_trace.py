"""Traces and tokens: what a prompt keeps of the one before it, and what no reader can make sense of."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvmover_client.replay import trace, traces_path
from kvmover_client.replay.tokens import chain, conversation
from kvmover_client.replay.trace import Session, TraceError, Turn, read_sessions


def _written(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _compact(*requests: tuple[int, int, int], **fields: object) -> dict[str, object]:
    return {"id": "s", **fields, "requests": [{"in": i, "out": o, "keep": k, "runs": []} for i, o, k in requests]}


def _read(path: Path) -> list[Session]:
    return read_sessions(path, sessions_max=100, turns_max=100)


def test_a_prompt_that_keeps_all_full_blocks_goes_on_from_the_reply(tmp_path: Path) -> None:
    path = _written(tmp_path / "t.jsonl", _compact((130, 10, 0), (150, 20, 2), tool_tokens=100))
    assert _read(path) == [Session("s", 64, (Turn(130, 10, 0), Turn(150, 20, 140)))]


def test_a_prompt_too_short_for_the_reply_keeps_only_whole_blocks(tmp_path: Path) -> None:
    path = _written(tmp_path / "t.jsonl", _compact((130, 30, 0), (150, 20, 2)))
    assert _read(path)[0].turns[1] == Turn(150, 20, 128)


def test_a_prompt_that_lost_blocks_keeps_what_is_left(tmp_path: Path) -> None:
    path = _written(tmp_path / "t.jsonl", _compact((640, 10, 0), (900, 20, 4), (300, 1, 0)))
    assert [turn.kept_tokens for turn in _read(path)[0].turns] == [0, 256, 0]


def test_sub_agents_are_sessions_of_their_own(tmp_path: Path) -> None:
    record = _compact((130, 10, 0), tool_tokens=640)
    sub = {"type": "subagent", "requests": [{"in": 70, "out": 5, "keep": 0}]}
    record["requests"] = [*record["requests"], sub]  # type: ignore[misc]
    assert _read(_written(tmp_path / "t.jsonl", record)) == [
        Session("s", 640, (Turn(130, 10, 0),)),
        Session("s/1", 0, (Turn(70, 5, 0),)),
    ]


def test_lists_of_hit_uncached_generated_are_turns(tmp_path: Path) -> None:
    simple = {"session": "w", "warm_prefix": 130, "turns": [[0, 200, 20, 0], [192, 100, 9, 12.0]]}
    synthetic = {"session": 7, "turns": [[64, 136, 30], [192, 100, 9], [64, 10, 1]]}
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(simple) + "\n\n" + json.dumps(synthetic) + "\n")
    assert _read(path) == [
        Session("w", 128, (Turn(200, 20, 0), Turn(292, 9, 220))),
        Session("7", 0, (Turn(200, 30, 0), Turn(292, 9, 230), Turn(74, 1, 64))),
    ]


def test_sessions_and_turns_are_cut_to_what_is_asked_for(tmp_path: Path) -> None:
    path = _written(tmp_path / "t.jsonl", *[_compact((64, 1, 0), (100, 1, 1), (200, 1, 1))] * 3)
    found = read_sessions(path, sessions_max=2, turns_max=1)
    assert [len(session.turns) for session in found] == [1, 1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"timestamp": 0, "hash_ids": [1]}', r"fields \['hash_ids', 'timestamp'\]"),
        ('{"requests": [{"in": 0, "out": 1, "keep": 0}]}', "`in` is 0"),
        ('{"requests": [{"in": 5, "out": -1, "keep": 0}]}', "`out` is -1"),
        ('{"requests": [{"in": 5, "out": 1}]}', "`keep` is None"),
        ('{"requests": [3]}', "list of objects"),
        ('{"turns": [[1, 2]]}', r"turns\[0\] must be"),
        ('{"turns": [[1, true, 3]]}', "`uncached` is True"),
        ('{"turns": [[0, 0, 3]]}', "empty prompt"),
    ],
)
def test_a_line_of_another_kind_is_refused_with_its_number(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(_compact((64, 1, 0))) + "\n" + line + "\n")
    with pytest.raises(TraceError, match=rf"t\.jsonl:2.*{said}"):
        _read(path)


def test_a_file_that_is_missing_empty_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        _read(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="no session"):
        _read(_written(tmp_path / "empty.jsonl"))
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(json.dumps(_compact((64, 1, 0))).encode())[:-9])
    with pytest.raises(TraceError, match=r"broken\.jsonl\.gz"):
        _read(broken)


def test_an_overlong_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "LINE_BYTES_MAX", 50)
    with pytest.raises(TraceError, match="longer than 50 bytes"):
        _read(_written(tmp_path / "t.jsonl", _compact((64, 1, 0), (100, 1, 1))))


def test_the_built_in_trace_shares_its_tools_and_mostly_goes_on() -> None:
    found = _read(traces_path())
    assert [len(session.turns) for session in found] == [5, 12, 12, 12, 12, 12]
    assert Counter(session.shared_tokens for session in found) == {7936: 4, 832: 1, 8256: 1}
    turns = [(a, b) for session in found for a, b in itertools.pairwise(session.turns)]
    went_on = sum(b.kept_tokens == a.prompt_tokens + a.output_tokens for a, b in turns)
    assert went_on > 0.8 * len(turns)
    assert max(session.context_tokens for session in found) < 27_000


def test_prompts_share_what_the_trace_says_and_nothing_more() -> None:
    session = Session("s", 64, (Turn(200, 30, 0), Turn(300, 5, 230), Turn(150, 5, 100), Turn(150, 5, 0)))
    first, second, third, fourth = conversation(session, 1)
    assert (second.prompt[:230] == first.all).all()
    assert (third.prompt[:100] == second.prompt[:100]).all()
    assert not (third.prompt[100:] == second.prompt[100:150]).any()
    assert (fourth.prompt[:64] == first.prompt[:64]).all()
    assert not (fourth.prompt[64:] == third.prompt[64:]).any()
    assert [(len(turn.prompt), len(turn.reply)) for turn in (first, second, third, fourth)] == [
        (200, 30),
        (300, 5),
        (150, 5),
        (150, 5),
    ]


def test_sessions_with_the_same_tools_begin_alike_and_then_differ() -> None:
    one, other = (next(conversation(Session(name, 128, (Turn(256, 1, 0),)), 1)) for name in ("a", "b"))
    assert (one.prompt[:128] == other.prompt[:128]).all()
    assert not (one.prompt[128:] == other.prompt[128:]).any()
    stranger = next(conversation(Session("a", 192, (Turn(256, 1, 0),)), 1))
    assert not (one.prompt[:128] == stranger.prompt[:128]).any()


def test_tokens_depend_on_the_seed_alone() -> None:
    session = Session("s", 0, (Turn(100, 10, 0),))
    once, again, other = (next(conversation(session, seed)).all for seed in (1, 1, 2))
    assert (once == again).all()
    assert once.dtype == np.uint32
    assert not (once == other).any()


def test_a_chain_word_depends_on_every_token_up_to_its_own() -> None:
    tokens = np.arange(500, dtype=np.uint32)
    words = chain(tokens)
    for changed in (0, 250, 499):
        others = tokens.copy()
        others[changed] += 1
        found = chain(others)
        assert (found[:changed] == words[:changed]).all()
        assert not (found[changed:] == words[changed:]).any()
    assert not (chain(tokens[::-1].copy()) == words).any()
    assert (chain(tokens[:100]) == words[:100]).all()
    assert len(np.unique(chain(np.zeros(10_000, dtype=np.uint32)))) == 10_000

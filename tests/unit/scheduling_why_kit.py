"""Whether an assignment's reasons agree with its own numbers."""

from __future__ import annotations

from kvmoverd.core.scheduling.explain import EngineWhy, Explain, Seen, classes
from kvmoverd.core.scheduling.requests import Assignment
from kvmoverd.core.status import Path


def assert_explained(explain: Explain, what: Assignment) -> None:
    """The engines that it names are those that were given; each was the best of its class, by the candidates that it shows."""
    assert (explain.prefill.engine, explain.decode.engine) == (what.prefill_engine, what.decode_engine)
    assert explain.waited_ns >= 0
    if explain.prefill.rule in ("C2", "C3"):
        _assert_prefill(explain.prefill)
    if explain.decode.rule in ("low", "least"):
        _assert_decode(explain.decode)
    _assert_path(explain, what)


def _chosen(why: EngineWhy) -> tuple[Seen, str, list[tuple[Seen, str]]]:
    classed = list(zip(why.board.at(why.step), classes(why), strict=True))
    seen, word = next(pair for pair in classed if pair[0].engine == why.engine)
    numbers = dict(why.numbers)
    assert (seen.tok_e, seen.read_queue_bytes) == (
        numbers["tok_e"],
        numbers.get("read_queue_bytes", seen.read_queue_bytes),
    )
    return seen, word, classed


def _assert_prefill(why: EngineWhy) -> None:
    seen, word, classed = _chosen(why)
    assert word == why.rule and seen.tok_e <= dict(why.numbers)["beta_tokens"]
    assert seen.tok_e == min(other.tok_e for other, its in classed if its == word)
    assert word == "C2" or "C2" not in [its for _, its in classed]


def _assert_decode(why: EngineWhy) -> None:
    seen, word, classed = _chosen(why)
    numbers = dict(why.numbers)
    assert seen.free_hbm_tokens >= numbers["tokens"]
    assert (seen.seq_e, seen.free_hbm_tokens) == (numbers["seq_e"], numbers["free_hbm_tokens"])
    if why.rule == "low":
        assert word == "low" and seen.seq_e == min(other.seq_e for other, its in classed if its == "low")
    else:
        assert word == "rest" and "low" not in [its for _, its in classed]
        assert seen.tok_e == min(other.tok_e for other, its in classed if its == "rest")


def _assert_path(explain: Explain, what: Assignment) -> None:
    ahead = dict(explain.path.queues)
    queues = ahead.get(what.prefill_node, -1), ahead.get(what.decode_node, -1)
    match explain.path.rule:
        case "shorter":
            assert what.read.path is (Path.PE if queues[0] < queues[1] else Path.DE)
        case "tie":
            assert queues[0] == queues[1] and what.read.path is Path.DE
        case "unknown":
            assert min(queues) < 0
        case "fixed":
            assert what.read.path is Path.PE

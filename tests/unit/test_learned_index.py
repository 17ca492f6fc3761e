"""What a storage without an index on disk knows of its blocks, and which of them it leaves alone for a while."""

from __future__ import annotations

from kvmoverd.adapters.storage.learned_index import BAD_MAX, LearnedIndex
from kvmoverd.core.layout import Layout
from kvmoverd.core.manifest import Manifest, Namespace


def namespace(model_id: str = "model") -> Namespace:
    layout = Layout(block_tokens=1, layers=((8,),))
    return Namespace(
        Manifest(
            model_id=model_id, weights_digest=b"w" * 32, tokenizer_digest=b"t" * 32, layout=layout, dtype="fp8_e4m3"
        )
    )


SPACE = namespace()


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def test_it_knows_what_was_found_but_not_what_was_lost_since_nor_what_was_purged() -> None:
    index, (one, two, three) = LearnedIndex(), keys(3)
    index.found(SPACE, [one, two])
    assert index.known(SPACE, [one, three, two]).tolist() == [True, False, True] and not index.complete
    index.lost(SPACE, one)
    assert index.known(SPACE, [one, two]).tolist() == [False, True]
    assert index.known(namespace("other"), [two]).tolist() == [False]
    assert index.pin(SPACE, [one, two], 60.0) == 1 and index.places(SPACE, [one, two]) == [None, None]
    index.forget(SPACE)
    assert index.known(SPACE, [one, two]).tolist() == [False, False]


def test_a_bad_block_is_left_alone_for_its_time_and_not_longer() -> None:
    clock = Clock()
    index, (one, two) = LearnedIndex(now_ns=clock), keys(2)
    index.mark_bad(SPACE, one, for_s=30.0)
    assert (index.bad_for_s(SPACE, one), index.bad_for_s(SPACE, two)) == (30.0, 0.0)
    assert index.bad_for_s(namespace("other"), one) == 0.0
    clock.ns = 29_000_000_000
    assert index.bad_for_s(SPACE, one) == 1.0
    index.mark_bad(SPACE, one, for_s=30.0)
    clock.ns = 58_999_999_999
    assert index.bad_for_s(SPACE, one) > 0.0 and index.bad_blocks == 1
    clock.ns = 59_000_000_000
    assert index.bad_for_s(SPACE, one) == 0.0 and index.bad_blocks == 0


def test_a_bad_block_that_is_repaired_is_tried_at_once() -> None:
    index, (one,) = LearnedIndex(), keys(1)
    index.mark_bad(SPACE, one, for_s=30.0)
    index.repaired(SPACE, one)
    index.repaired(SPACE, one)
    assert index.bad_for_s(SPACE, one) == 0.0 and index.bad_blocks == 0


def test_only_so_many_bad_blocks_are_remembered_and_the_oldest_are_tried_again() -> None:
    index, all_keys = LearnedIndex(), keys(BAD_MAX + 1)
    for key in all_keys:
        index.mark_bad(SPACE, key, for_s=30.0)
    assert index.bad_blocks == BAD_MAX
    assert index.bad_for_s(SPACE, all_keys[0]) == 0.0 and index.bad_for_s(SPACE, all_keys[1]) > 0.0

"""Shape of a Full Block: spans, padding and the bounds of sizes."""

from __future__ import annotations

import doctest
import itertools
from random import Random

import pytest

from kvmoverd.core import layout as layout_module
from kvmoverd.core.errors import BadLayout
from kvmoverd.core.layout import ALIGN_BYTES, HEADER_BYTES, Layout, padded


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(layout_module).failed == 0


def test_a_latent_cache_has_the_sizes_that_its_model_card_gives() -> None:
    layout = Layout.uniform(layers=61, tokens=64, token_bytes=656)
    assert layout.block_bytes == 2_561_024
    assert layout.layer_bytes[0] == 41_984
    assert layout.record_bytes == HEADER_BYTES + 2_564_096


def test_spans_of_layers_and_segments_tile_the_block_without_gaps() -> None:
    random = Random(1)
    for _ in range(50):
        layers = tuple(
            tuple(random.randint(1, 999) for _ in range(random.randint(1, 8))) for _ in range(random.randint(1, 20))
        )
        layout = Layout(random.randint(1, 64), layers)
        at = 0
        for layer, segments in enumerate(layers):
            assert layout.layer_span(layer) == range(at, at + sum(segments))
            for offset, size_bytes in zip(layout.segment_offsets(layer), segments, strict=True):
                assert offset == at
                at += size_bytes
        assert layout.block_bytes == at


def test_a_record_is_the_header_and_the_payload_rounded_up_to_whole_pages() -> None:
    for payload_bytes in (1, ALIGN_BYTES - 1, ALIGN_BYTES, ALIGN_BYTES + 1):
        assert padded(payload_bytes) % ALIGN_BYTES == 0
        assert 0 <= padded(payload_bytes) - payload_bytes < ALIGN_BYTES
        assert Layout(1, ((payload_bytes,),)).record_bytes == HEADER_BYTES + padded(payload_bytes)


def test_reads_of_layer_ranges_tile_the_record_in_whole_pages_and_bring_the_layers_they_name() -> None:
    random = Random(2)
    for _ in range(100):
        layers = tuple((random.choice((3, 500, 4096, 41_984)),) for _ in range(random.randint(1, 20)))
        layout = Layout(16, layers)
        cuts = sorted({0, len(layers), *(random.randint(0, len(layers)) for _ in range(4))})
        at = 0
        for first, stop in itertools.pairwise(cuts):
            span = layout.read_span(first, stop)
            assert span.start == at
            assert span.stop % ALIGN_BYTES == 0
            assert HEADER_BYTES + layout.layer_span(stop - 1).stop <= span.stop
            at = span.stop
        assert at == layout.record_bytes


def test_tail_bytes_grow_with_the_tokens_and_end_at_the_whole_segment() -> None:
    layout = Layout(64, ((16,), (4096,)))
    for size_bytes in (16, 4096):
        found = [layout.tail_bytes(size_bytes, tokens) for tokens in range(65)]
        assert found == sorted(found)
        assert found[0] == 0
        assert found[1] >= 1
        assert found[64] == size_bytes


@pytest.mark.parametrize(
    ("tokens", "layers", "message"),
    [
        (0, ((1,),), "block_tokens is 0, must be 1 to 4096"),
        (4097, ((1,),), "block_tokens is 4097, must be 1 to 4096"),
        (1, (), "the layout has 0 layers, must be 1 to 512"),
        (1, ((1,),) * 513, "the layout has 513 layers, must be 1 to 512"),
        (1, ((1,), ()), "layer 1 has 0 segments, must be 1 to 8"),
        (1, ((1,) * 9,), "layer 0 has 9 segments, must be 1 to 8"),
        (1, ((0,),), "layer 0 has a segment of 0 bytes, must be 1 to 1073741824"),
        (1, (((1 << 30) + 1,),), "layer 0 has a segment of 1073741825 bytes, must be 1 to 1073741824"),
    ],
)
def test_a_size_outside_its_bounds_is_refused_with_the_number(
    tokens: int, layers: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(BadLayout) as refused:
        Layout(tokens, layers)
    assert str(refused.value) == message

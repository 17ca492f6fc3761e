"""Which layers of its last blocks a reader can give to another one: a rectangle of blocks and layers. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvmoverd.core.layout import Layout


def choose_rest(begun_layers: Callable[[int], int], blocks: int, kept_blocks: int, layout: Layout) -> tuple[int, int]:
    """(kept, first_layer): of blocks [kept, blocks) the layers from `first_layer` on, as many bytes as can be given so.

    `begun_layers`: how many leading layers of a block are there, or in a device; all of them where it can't be given. It is asked
    from the last block on, for each block once at most. `kept` is never below `kept_blocks`. A block that has less than
    `first_layer` layers is brought so far. `first_layer` 0: there is nothing to give.

    >>> layout = Layout.uniform(layers=4, tokens=1, token_bytes=1)
    >>> choose_rest([3, 2, 2, 1, 2].__getitem__, 5, 0, layout), choose_rest([2, 2, 2, 1, 1].__getitem__, 5, 3, layout)
    ((1, 2), (3, 1))
    """
    best, best_bytes, first_layer = (blocks, 0), 0, 0
    for kept in range(blocks - 1, kept_blocks - 1, -1):
        first_layer = max(first_layer, begun_layers(kept))
        if first_layer >= layout.layer_count:
            break
        given_bytes = (blocks - kept) * (layout.block_bytes - layout.layer_offsets[first_layer])
        if first_layer and given_bytes > best_bytes:
            best, best_bytes = (kept, first_layer), given_bytes
    return best

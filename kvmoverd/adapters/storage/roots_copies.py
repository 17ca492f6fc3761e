"""Copies under way: of blocks that were stored in the main root, and of blocks that were read from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvmoverd.adapters.storage.roots_root import Root
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.record import RecordMismatch, decode, memory_view
from kvmoverd.ports.storage import BlockRead, BlockWrite

COPIES_MAX = 64
"""Blocks whose copies are being made; their slots stay with the devices that long. Those of more blocks are dropped."""
FILLS_MAX = 8
"""Of these, blocks that were read: they hold up what the pool has for reads, and are made at nobody's wish."""


@dataclass(slots=True)
class _Copy:
    """One block: where it goes next. `begun_s`: when the main root was asked; `fill`: to be read."""

    op: BlockWrite
    roots: deque[Root]
    begun_s: float
    fill: bool
    at: Root | None = None
    """Who makes a copy now."""


class Copies:
    """For the loop, but for `busy`. Of each block one copy is made after another: each adapter fills in the header.

    No copy is made where the namespace was opened after the main root was asked: a purge may lie between.
    """

    def __init__(self, roots: Sequence[Root]) -> None:
        self._under_way: dict[int, _Copy] = {}
        self._copies = [root for root in roots if not root.settings.is_main]
        main = next(at for at, root in enumerate(roots) if root.settings.is_main)
        self._filled = [root for root in roots[:main] if root.settings.fill]
        """Copies that are read before the main root is."""
        self._fills = 0
        self.fills = bool(self._filled)

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, op_id: int) -> bool:
        return op_id in self._under_way

    def busy(self, root: Root, fingerprint: bytes) -> bool:
        """Does this root make a copy of a block of the namespace? For any thread."""
        copies = list(self._under_way.values())
        return any(copy.at is root and copy.op.namespace.fingerprint == fingerprint for copy in copies)

    def begin(self, op: BlockWrite, begun_s: float) -> bool:
        """A write has ended well in the main root; should there be copies?"""
        fingerprint = op.namespace.fingerprint
        roots = deque(root for root in self._copies if root.may_copy(fingerprint, begun_s))
        if roots and len(self._under_way) >= COPIES_MAX:
            for root in roots:
                root.counters.dropped_copies += 1
            return False
        return self._add(op, roots, begun_s, fill=False)

    def begin_fill(self, op: BlockRead, begun_s: float) -> bool:
        """A whole block came from the main root into its slot; should there be a copy, in the first root that can take it?"""
        if op.low:
            return False
        fingerprint, roots = op.namespace.fingerprint, deque[Root]()
        for root in self._filled:
            if root.healthy and root.may_copy(fingerprint, begun_s):
                roots.append(root)
                break
        if not roots:
            return False
        if self._fills >= FILLS_MAX or len(self._under_way) >= COPIES_MAX or not roots[0].has_place():
            roots[0].counters.skipped_fills += 1
            return False
        try:
            header = decode(memory_view(op.address, HEADER_BYTES))
        except RecordMismatch:
            # A root without content, as for measurements.
            return False
        write = BlockWrite(op.op_id, op.namespace, op.key, header.parent, header.depth, op.address)
        return self._add(write, roots, begun_s, fill=True)

    def next(self, op_id: int, now_s: float) -> tuple[Root, BlockWrite] | None:
        """Where to copy it now; None when there is nowhere any more."""
        copy = self._under_way[op_id]
        while copy.roots:
            # Said before it is asked whether it may: whoever shuts it looks here afterwards.
            root = copy.at = copy.roots.popleft()
            if root.may_copy(copy.op.namespace.fingerprint, copy.begun_s) and root.lets_in(copy.op, now_s):
                return root, copy.op
            root.counters.dropped_copies += 1
        copy.at = None
        return None

    def ended(self, op_id: int, root: Root, *, ok: bool) -> None:
        """One copy was made, or not."""
        if not ok:
            root.counters.dropped_copies += 1
        elif self._under_way[op_id].fill:
            root.counters.filled_blocks += 1

    def end(self, op_id: int) -> bool:
        """No more copies of this block; False if none were under way."""
        copy = self._under_way.pop(op_id, None)
        self._fills -= copy is not None and copy.fill
        return copy is not None

    def _add(self, op: BlockWrite, roots: deque[Root], begun_s: float, *, fill: bool) -> bool:
        if not roots:
            return False
        self._under_way[op.op_id] = _Copy(op, roots, begun_s, fill)
        self._fills += fill
        return True

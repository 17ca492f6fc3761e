"""Which root an op goes to, and what became of those that more than one root was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvmoverd.adapters.storage.roots_root import Root
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockProbe, BlockRead, BlockWrite, StorageDone, StorageOp

_LOST = frozenset({Reason.MISS, Reason.CORRUPT, Reason.SHORT_READ})


@dataclass(slots=True)
class _Asked:
    """An op that some roots could not answer: which, and the end to tell if nobody can.

    Of a probe: keys that were found so far, and those behind them.
    """

    names: set[str] = field(default_factory=set)
    failure: StorageDone | None = None
    present: int = 0
    left: tuple[bytes, ...] | None = None


class Routes:
    """For the loop. Roots in the order of reading; one that has not opened an op's namespace is not asked for it."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self._roots = tuple(roots)
        self._main = next(root for root in roots if root.settings.is_main)
        self._several = len(self._roots) > 1
        self._asked: dict[int, _Asked] = {}
        self._served: dict[int, tuple[Root, float]] = {}
        """Where the block came from whose later ranges are still to be read, and when it was begun, by the slot's address."""

    # Where to ---------------------------------------------------------------------------------------------------------

    def first(self, ops: Sequence[StorageOp]) -> list[Root]:
        """The root for each op to begin with."""
        found = [self._main] * len(ops)
        if self._several:
            reads: dict[bytes, list[int]] = {}
            for at, op in enumerate(ops):
                if isinstance(op, BlockRead) and not op.first_layer:
                    reads.setdefault(op.namespace.fingerprint, []).append(at)
                elif isinstance(op, BlockRead):
                    found[at] = self._served.get(op.address, (self._main, 0.0))[0]
                elif isinstance(op, BlockProbe) and not op.looks:
                    found[at] = self._roots_for(op)[0]
            for places in reads.values():
                self._first_reads([(at, ops[at]) for at in places], found)
        return found

    def _first_reads(self, reads: Sequence[tuple[int, StorageOp]], found: list[Root]) -> None:
        """The first root whose index knows the block; for one that none knows, the first that may have it."""
        namespace = reads[0][1].namespace
        keys = [op.key for _, op in reads if isinstance(op, BlockRead)]
        roots = self._opened(namespace)
        choice = np.full(len(keys), len(roots))
        for rank, root in reversed(list(enumerate(roots))):
            choice[root.storage.index.known(namespace, keys)] = rank
        for (at, op), rank in zip(reads, choice.tolist(), strict=True):
            found[at] = roots[rank] if rank < len(roots) else self._roots_for(op)[0]

    def others(self, op: BlockRead | BlockProbe) -> Iterator[Root]:
        """Roots in turn that were not asked yet; for a later range there is none."""
        asked = self._asked.setdefault(op.op_id, _Asked())
        if isinstance(op, BlockRead) and op.first_layer:
            return
        for root in self._roots_for(op) if self._several else ():
            if root.name not in asked.names and asked.left != ():
                yield root

    def rest(self, op: BlockRead | BlockProbe) -> BlockRead | BlockProbe:
        """What is left to ask: a probe goes on behind the keys that were found."""
        asked = self._asked.get(op.op_id)
        if asked is not None and asked.left is not None:
            return BlockProbe(op.op_id, op.namespace, asked.left)
        return op

    def _opened(self, namespace: Namespace) -> list[Root]:
        return [root for root in self._roots if namespace.fingerprint in root.opened] or [self._main]

    def _roots_for(self, op: StorageOp) -> list[Root]:
        """Who knows the block, then those whose index is not complete, then, where a hint came along, the others."""
        opened = self._opened(op.namespace)
        if isinstance(op, BlockProbe) and op.looks:
            return [self._main]
        if isinstance(op, BlockProbe):
            return [root for root in opened if not root.storage.index.complete] or opened[:1]
        assert isinstance(op, BlockRead), f"{op} goes to the main root"
        knows = [bool(root.storage.index.known(op.namespace, [op.key])[0]) for root in opened]
        sure = [root for root, knowing in zip(opened, knows, strict=True) if knowing]
        unsure = [root for root, knowing in zip(opened, knows, strict=True) if not knowing]
        perhaps = [root for root in unsure if not root.storage.index.complete]
        hinted = [root for root in unsure if root.storage.index.complete] if op.place is not None else []
        return [*sure, *perhaps, *hinted] or opened[:1]

    # What became of it ------------------------------------------------------------------------------------------------

    def failed(self, op: BlockRead | BlockProbe, root: Root, done: StorageDone) -> None:
        """This root has no answer. Of all failures the first that is no miss will be told."""
        asked = self._asked.setdefault(op.op_id, _Asked())
        asked.names.add(root.name)
        if asked.failure is None or (asked.failure.reason is Reason.MISS and done.reason is not Reason.MISS):
            asked.failure = done
        if self._several and isinstance(op, BlockRead) and done.reason in _LOST:
            root.storage.index.lost(op.namespace, op.key)

    def probed(self, op: BlockProbe, root: Root, done: StorageDone) -> None:
        asked = self._asked.setdefault(op.op_id, _Asked())
        asked.names.add(root.name)
        if done.reason is not Reason.OK:
            self.failed(op, root, done)
        else:
            self._found(root, op.namespace, op.keys[: done.present])
            self._go_on(asked, op, done.present)

    def _go_on(self, asked: _Asked, op: BlockProbe, present: int) -> None:
        """Behind the keys that a probe has found there may be some that need none."""
        left = op.keys[present:]
        for root in self._opened(op.namespace) if left else ():
            known = root.storage.index.known(op.namespace, left)
            here = len(left) if known.all() else int(known.argmin())
            present, left = present + here, left[here:]
            if not left:
                break
        asked.present += present
        asked.left = left

    def verdict(self, op: BlockRead | BlockProbe) -> StorageDone:
        """The end of an op that nobody is left to be asked for."""
        asked = self._asked.pop(op.op_id, None) or _Asked()
        if isinstance(op, BlockRead):
            self._served.pop(op.address, None)
            return asked.failure or StorageDone(op.op_id, Reason.MISS)
        if asked.present or asked.failure is None:
            return StorageDone(op.op_id, Reason.OK, present=asked.present)
        return StorageDone(op.op_id, asked.failure.reason, message=asked.failure.message)

    def served(self, op: BlockRead, root: Root, begun_s: float) -> float | None:
        """A read ended well; what is still to come of the block will come from there.

        When the slot has the whole block it says since when it was read, on the set's clock; None when that is not known, or it
        has not.
        """
        self._asked.pop(op.op_id, None)
        if op.first_layer:
            begun = self._served.pop(op.address, None)
            if begun is None or begun[0] is not root:
                return None
            begun_s = begun[1]
        if op.stop_layer and op.stop_layer < op.namespace.layout.layer_count:
            self._served[op.address] = root, begun_s
            return None
        self._served.pop(op.address, None)
        self._found(root, op.namespace, [op.key])
        return None if op.rest_from else begun_s

    def written(self, op: BlockWrite, root: Root) -> None:
        if self._several:
            self._found(root, op.namespace, [op.key])

    def forget(self, op: BlockRead | BlockWrite) -> None:
        """The op was given up."""
        self._asked.pop(op.op_id, None)
        if isinstance(op, BlockRead):
            self._served.pop(op.address, None)

    def _found(self, root: Root, namespace: Namespace, keys: Sequence[bytes]) -> None:
        index = root.storage.index
        if keys and not index.complete:
            index.found(namespace, keys)

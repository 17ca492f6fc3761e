"""Writes blocks from pool slots to storage: each once, however many ask for it, and each caller is told how it ended.

What is not stored is counted by why, and told to the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvmoverd.core.drops import Drop, drop_of_write
from kvmoverd.core.errors import Draining, QueueFull
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.node.pool import SizeClass
from kvmoverd.node.services import Services
from kvmoverd.node.stored import find_stored, known_stored
from kvmoverd.node.write_book import Name, OnWritten, name_of
from kvmoverd.ports.storage import StorageDone


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """A block and its place in the chain."""

    key: bytes
    parent: bytes
    depth: int


def write_blocks(
    services: Services,
    namespace: Namespace,
    blocks: Sequence[ChainBlock],
    size_class: SizeClass,
    slots: Sequence[int],
    done: Callable[[int, Reason], None],
) -> None:
    """Stores blocks that lie in slots, but for those that are stored; `done` is called once for each, with its index.

    As `write_block` in all else, and hands them to the storage.
    """

    keys = [block.key for block in blocks]
    known = known_stored(services, namespace, keys)

    def write(index: int) -> None:
        write_block(services, namespace, blocks[index], size_class, slots[index], lambda reason: done(index, reason))

    def found(stored: frozenset[int]) -> None:
        for index in known:
            if index in stored:
                done(index, Reason.OK)
            else:
                write(index)
        services.desk.submit()

    for index in sorted(set(range(len(blocks))).difference(known)):
        write(index)
    find_stored(services, namespace, keys, known, found)


def write_block(
    services: Services,
    namespace: Namespace,
    block: ChainBlock,
    size_class: SizeClass,
    slot: int,
    done: OnWritten,
    *,
    layer_crcs: tuple[int, ...] = (),
) -> None:
    """Queues the write, or joins one of the same block; `done` is called once. A full queue drops the block: `Reason.DROPPED`.

    The slot is the device's until the completion is quiet, which may be after `done`: it is quarantined if its owner gives
    it up before. With a write that was joined it has nothing to do. `layer_crcs` as in `BlockWrite`.
    """
    purges = services.reader.purges(namespace)
    name = name_of(namespace, block.key, purges)
    if services.writes.join(name, done):
        return
    write = _Write(services, namespace, name, size_class, slot)
    address = int(size_class.addresses([slot])[0])
    size_class.device_begin([slot])
    try:
        services.desk.write(
            namespace, block.key, block.parent, block.depth, address, write.ended, layer_crcs=layer_crcs
        )
    except QueueFull as error:
        size_class.device_end([slot])
        note_dropped(services, Drop.FULL_QUEUE, 1, str(error))
        done(Reason.DROPPED)
        return
    services.writes.begin(name, done)


@contextmanager
def counting_refused(services: Services, blocks: int) -> Iterator[None]:
    """So many blocks are lost when what is done inside is refused as the node is full, or draining."""
    try:
        yield
    except QueueFull as error:
        note_dropped(services, Drop.FULL_QUEUE, blocks, str(error))
        raise
    except Draining as error:
        note_dropped(services, Drop.SHUTTING_DOWN, blocks, str(error))
        raise


@dataclass(slots=True)
class _Write:
    """One write under way: a second completion may come, when the device has let go of the slot."""

    services: Services
    namespace: Namespace
    name: Name
    size_class: SizeClass
    slot: int
    told: bool = False

    def ended(self, completion: StorageDone) -> None:
        if not self.told:
            self.told = True
            self._settle(completion)
            waiting = self.services.writes.end(self.name)
        else:
            waiting = []
        if completion.quiet:
            self.size_class.device_end([self.slot])
        for waiter in waiting:
            waiter(completion.reason)

    def _settle(self, completion: StorageDone) -> None:
        services, namespace, (_, key, purges) = self.services, self.namespace, self.name
        if completion.reason is Reason.OK:
            services.reader.stored(namespace, key, self.size_class, self.slot, purges)
            return
        purged = purges != services.reader.purges(namespace)
        why = Drop.PURGED if purged else drop_of_write(completion.reason)
        note_dropped(services, why, 1, f"block {key.hex()}: {completion.message}")


def join_write(services: Services, namespace: Namespace, key: bytes, done: OnWritten) -> bool:
    """Has `done` told how the write of this block ends that is under way here; False when there is none."""
    return services.writes.join(name_of(namespace, key, services.reader.purges(namespace)), done)


def note_dropped(services: Services, why: Drop, blocks: int, message: str) -> None:
    """So many new blocks will not be stored."""
    if blocks:
        services.counts.dropped[why.value] += blocks
        services.observer.blocks_dropped(why.value, blocks, message)

"""Writes one block from a pool slot to storage; every caller gets one outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvmoverd.core.errors import QueueFull
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.node.pool import SizeClass
from kvmoverd.node.services import Services
from kvmoverd.ports.storage import StorageDone


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """A block and its place in the chain."""

    key: bytes
    parent: bytes
    depth: int


def write_block(
    services: Services,
    namespace: Namespace,
    block: ChainBlock,
    size_class: SizeClass,
    slot: int,
    done: Callable[[Reason], None],
    *,
    layer_crcs: tuple[int, ...] = (),
) -> None:
    """Queues the write; `done` is called once. A full queue drops the block: `Reason.DROPPED`.

    The slot is the device's until the completion is quiet, which may be after `done`: it is quarantined if its owner gives
    it up before. `layer_crcs` as in `BlockWrite`.
    """

    purges = services.reader.purges(namespace)
    told = False

    def on_done(completion: StorageDone) -> None:
        nonlocal told
        if completion.quiet and told:
            size_class.device_end([slot])
            return
        told = True
        if completion.reason is Reason.OK:
            services.reader.stored(namespace, block.key, size_class, slot, purges)
        else:
            services.reader.lost(namespace, block.key, completion)
        if completion.quiet:
            size_class.device_end([slot])
        done(completion.reason)

    address = int(size_class.addresses([slot])[0])
    size_class.device_begin([slot])
    try:
        services.desk.write(namespace, block.key, block.parent, block.depth, address, on_done, layer_crcs=layer_crcs)
    except QueueFull:
        size_class.device_end([slot])
        done(Reason.DROPPED)

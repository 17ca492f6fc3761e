"""What tests of write-back share: stores, what they wrote, and what was dropped."""

from __future__ import annotations

from collections.abc import Callable

from node_kit import LAYOUT, Engine, NodeKit

from kvmoverd.core.keys import ROOT
from kvmoverd.core.machines.actions import AnnounceBlocks
from kvmoverd.core.status import Reason
from kvmoverd.node.outbox import Told
from kvmoverd.node.sessions import as_pages
from kvmoverd.node.storing import Chain, StoreDriver
from kvmoverd.ports.storage import BlockWrite, StorageOp

RECORD = LAYOUT.record_bytes


def store(kit: NodeKit, engine: Engine, keys: tuple[bytes, ...], *, timeout_s: float = 5.0) -> StoreDriver:
    kit.fill(engine, keys)
    pages = as_pages(list(range(len(keys))))
    call = kit.call(engine, timeout_s=timeout_s)
    return kit.node.store(call, kit.namespace, Chain(keys, ROOT, 0), engine.region, pages)


def reasons(events: list[Told]) -> list[Reason]:
    """Of each block, as the caller was told; told once."""
    (blocks,) = [event.outcomes for event in events if isinstance(event, AnnounceBlocks)]
    return [outcome.reason for outcome in blocks]


def dropped(kit: NodeKit) -> dict[str, int]:
    """By why; the log was told the same."""
    found = dict(kit.services.counts.dropped)
    assert found == {why: n for (kind, why), n in kit.observer.counts.items() if kind == "dropped"}
    return found


def written(kit: NodeKit) -> list[BlockWrite]:
    """All writes that the storage gets from now on."""
    ops: list[BlockWrite] = []

    def note(op: StorageOp) -> Reason | None:
        if isinstance(op, BlockWrite):
            ops.append(op)
        return None

    kit.disk.fails = note
    return ops


def failing_writes(reason: Reason) -> Callable[[StorageOp], Reason | None]:
    return lambda op: reason if isinstance(op, BlockWrite) else None


async def let_go(kit: NodeKit) -> None:
    kit.disk.closed = kit.wire.closed = False
    while kit.disk.release_one() or kit.wire.release_one():
        pass


async def home(kit: NodeKit) -> None:
    await let_go(kit)
    for engine in kit.engines:
        kit.node.session_closed(engine.session.session_id, "done")
    await kit.everything_is_home()
    assert len(kit.services.writes) == 0

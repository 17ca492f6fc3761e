"""Raw hands on reservations and parts of a daemon's node-to-node API."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rpc_kit import HERE, LAYERS, Engine, Kit, keys_of

from kvmover_proto import common_pb2, node_pb2

BOOT = "boot"
PART_NUMBERS = itertools.count(1)


def reservation(engine: Engine, **changed: Any) -> node_pb2.ReserveRequest:
    fields: dict[str, Any] = {
        "request_id": "r",
        "attempt": 1,
        "fingerprint": engine.fingerprint,
        "block_keys": b"".join(keys_of(engine.fingerprint, 2)),
        "timeout_ms": 5_000,
        "node": HERE,
        "boot_id": BOOT,
    }
    return node_pb2.ReserveRequest(**(fields | changed))


async def reserved(kit: Kit, engine: Engine, **changed: Any) -> node_pb2.ReserveReply:
    await kit.hello(changed.get("node", HERE))
    return await kit.ask_node("Reserve", reservation(engine, **changed))


def opening(ticket: node_pb2.Ticket | None, **changed: Any) -> node_pb2.OpenPart:
    """Of all hits of the usual reservation, with credit for all layers."""
    fields: dict[str, Any] = {
        "ticket": ticket,
        "sink": 1,
        "credit_layers": LAYERS,
        "part": next(PART_NUMBERS),
        "node": HERE,
        "boot_id": BOOT,
        "blocks": runs((0, 2)),
        "timeout_ms": 5_000,
    }
    return node_pb2.OpenPart(**(fields | changed))


def runs(*spans: tuple[int, int]) -> common_pb2.BlockRuns:
    return common_pb2.BlockRuns(first=[first for first, _ in spans], count=[stop - first for first, stop in spans])


def read_part(kit: Kit, ticket: node_pb2.Ticket | None, **changed: Any) -> Any:
    return kit.ask_node("ReadPart", iter([node_pb2.ReadPartRequest(open=opening(ticket, **changed))]))


async def opened_part(kit: Kit, ticket: node_pb2.Ticket | None, **changed: Any) -> Any:
    """A part whose owner may go on talking."""
    call = kit.ask_node("ReadPart", None)
    await call.write(node_pb2.ReadPartRequest(open=opening(ticket, **changed)))
    return call


def stop_part(kit: Kit, part: int, node: str = HERE, boot_id: str = BOOT) -> Any:
    return kit.ask_node("StopPart", node_pb2.StopPartRequest(node=node, boot_id=boot_id, part=part))


def release(kit: Kit, ticket: node_pb2.Ticket, reason: int = common_pb2.CANCELLED) -> Any:
    return kit.ask_node("ReleaseTicket", node_pb2.ReleaseTicketRequest(ticket=ticket, reason=reason))


def set_prefix(
    kit: Kit, ticket: node_pb2.Ticket, prefix_blocks: int, helped: Sequence[node_pb2.HelpedPart] = ()
) -> Any:
    request = node_pb2.SetPrefixRequest(ticket=ticket, prefix_blocks=prefix_blocks, helped=helped)
    return kit.ask_node("SetPrefix", request)

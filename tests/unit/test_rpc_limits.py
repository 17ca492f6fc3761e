"""Servers that are full, and deliveries that nobody listens to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_kit import LAYERS, Kit, answered, end_of, refused, rpc_kit

from kvmover_proto import common_pb2, engine_pb2
from kvmoverd.rpc.call_limits import SPARE_MAX


async def test_a_full_server_still_says_how_it_is_and_takes_back_what_was_given(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, engine_api={"streams_max": 2}) as kit:
        engine = await kit.engine()
        running = [engine.assemble(f"r{number}", timeout_ms=60_000) for number in range(2)]
        await kit.until_live(lambda: len(kit.node.decode_side._waiting) == 2)
        found = await refused(engine.ask("Lookup", engine_pb2.LookupRequest(fingerprint=engine.fingerprint)))
        assert found.reason == "QUEUE_FULL"
        assert (await kit.status()).sessions == 1
        health: Any = health_pb2_grpc.HealthStub(kit.engine_channel)
        asked = health_pb2.HealthCheckRequest(service="kvmover.v1.Engine")
        assert (await health.Check(asked, timeout=5.0)).status == health_pb2.HealthCheckResponse.SERVING
        watches = [health.Watch(asked) for _ in range(SPARE_MAX)]
        for watch in watches:
            assert (await answered(watch.read())).status == health_pb2.HealthCheckResponse.SERVING
        assert (await refused(health.Watch(asked))).reason == "QUEUE_FULL"
        assert (await kit.status()).sessions == 1
        await engine.ask("Renew", engine_pb2.RenewRequest())
        for number in range(2):
            await engine.ask("Cancel", engine_pb2.CancelRequest(request_id=f"r{number}", attempt=1))
        for watch in watches:
            watch.cancel()
        await kit.until_live(lambda: not kit.node.decode_side._waiting)
        for call in running:
            assert (await end_of(call)).status.reason == common_pb2.CANCELLED
        lookup = engine_pb2.LookupRequest(fingerprint=engine.fingerprint)
        assert (await answered(engine.ask("Lookup", lookup))).prefix_blocks == 0
        await kit.everything_is_home()


async def test_a_delivery_whose_caller_vanishes_ends_with_its_request(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        assembled = engine.assemble("r")
        pushed = engine.push(engine.plan("r"), LAYERS)
        while (await answered(assembled.read())).WhichOneof("kind") != "whole":
            pass
        assert (await end_of(pushed)).status.reason == common_pb2.OK
        held = hold_sends(kit)
        pages = common_pb2.PageSet(pages=[4, 5])
        delivered = engine.ask(
            "Deliver",
            engine_pb2.DeliverRequest(request_id="r", attempt=1, region_id=engine.region_id, pages=pages),
        )
        await kit.until_live(lambda: held)
        delivered.cancel()
        (driver,) = [driver for driver in kit.node.requests.live() if driver.kind == "assemble"]
        await kit.until_live(lambda: driver.machine.state.name == "DRAINING")
        for send in held:
            send()
        end = await end_of(assembled)
        assert (end.status.reason, end.status.message) == (common_pb2.CANCELLED, "the caller of Deliver went away")
        await kit.everything_is_home()


def hold_sends(kit: Kit) -> list[Callable[[], None]]:
    """From now on what is sent waits until the test calls it."""
    held: list[Callable[[], None]] = []
    mover = kit.node.services.mover
    send = mover.send
    mover.send = lambda *what, **how: held.append(lambda: send(*what, **how))  # type: ignore[method-assign]
    return held

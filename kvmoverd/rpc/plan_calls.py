"""The incoming side of StreamLayers and PushLayers: one plan, then "computed" messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvmover_proto import engine_pb2
from kvmoverd.core.errors import BadRequest, KvmoverError
from kvmoverd.core.status import Reason
from kvmoverd.node.driver import Driver
from kvmoverd.node.prefill import PrefillRequest

PLAN_WAIT_S = 10.0

Incoming = engine_pb2.StreamLayersRequest | engine_pb2.PushLayersRequest


async def first_plan(requests: AsyncIterator[Incoming]) -> engine_pb2.RequestPlan:
    """Raises `BadRequest` when the first message is no plan, or does not come."""
    try:
        first = await asyncio.wait_for(anext(requests), PLAN_WAIT_S)
    except (TimeoutError, StopAsyncIteration):
        raise BadRequest(f"the first message must be a plan, none came within {PLAN_WAIT_S:g} s") from None
    if first.WhichOneof("kind") != "plan":
        raise BadRequest("the first message must be a plan")
    return first.plan


async def computed_layers(requests: AsyncIterator[Incoming], driver: Driver, request: PrefillRequest) -> None:
    """Hands "computed" messages to the request; a bad one ends it, and is raised."""
    try:
        async for message in requests:
            if message.WhichOneof("kind") != "computed":
                raise BadRequest("after the plan only computed layers may come, and one plan is enough")
            request.computed(message.computed.layers)
    except KvmoverError as error:
        driver.stop(Reason.CANCELLED, str(error))
        raise
    except Exception as error:
        driver.stop(Reason.INTERNAL, f"its computed layers were not taken: {type(error).__name__}")
        raise

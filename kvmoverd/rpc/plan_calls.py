"""The incoming side of StreamLayers and PushLayers: one plan, then "computed" messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from kvmover_proto import engine_pb2
from kvmoverd.core.errors import BadRequest, KvmoverError
from kvmoverd.core.status import Reason
from kvmoverd.node.driver import Driver
from kvmoverd.node.prefill import PrefillRequest

log = logging.getLogger(__name__)

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


@asynccontextmanager
async def computed_layers(
    requests: AsyncIterator[Incoming], driver: Driver, request: PrefillRequest
) -> AsyncIterator[None]:
    """Feeds "computed" messages to the request while its events are being sent; bad ones end the request."""
    feeding = asyncio.get_running_loop().create_task(_feed(requests, driver, request))
    try:
        yield
    finally:
        feeding.cancel()
    if feeding.done() and not feeding.cancelled() and (error := feeding.exception()) is not None:
        raise error


async def _feed(requests: AsyncIterator[Incoming], driver: Driver, request: PrefillRequest) -> None:
    try:
        async for message in requests:
            if message.WhichOneof("kind") != "computed":
                raise BadRequest("a second plan came in the same call")
            request.computed(message.computed.layers)
    except KvmoverError as error:
        driver.stop(Reason.CANCELLED, str(error))
        raise
    except (grpc.aio.UsageError, grpc.aio.InternalError) as error:
        log.debug("the incoming side of %s ended: %s", driver.call.request_id, error)

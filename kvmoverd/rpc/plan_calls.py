"""The incoming side of StreamLayers and PushLayers: one plan, then "computed" messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from kvmover_proto import engine_pb2
from kvmoverd.core.errors import BadRequest, KvmoverError
from kvmoverd.core.status import Reason
from kvmoverd.node.driver import Driver
from kvmoverd.node.prefill import PrefillRequest
from kvmoverd.node.progress import ProgressEntry
from kvmoverd.rpc.feeding import fed

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


class PageCredits:
    """What the engine writes on its credit page for one call. A wrong number ends the request, as a wrong message does."""

    def __init__(self, driver: Driver, request: PrefillRequest) -> None:
        self.error: Exception | None = None
        self._driver = driver
        self._request = request
        self._layers = 0

    def take(self, layers: int) -> None:
        if self.error is not None:
            return
        try:
            if layers < self._layers:
                raise BadRequest(f"layers [0, {layers}) said to be computed after [0, {self._layers})")
            self._layers = layers
            self._request.computed(layers)
        except KvmoverError as error:
            self.error = error
            self._driver.stop(Reason.CANCELLED, str(error))
        except Exception as error:
            self.error = error
            self._driver.stop(Reason.INTERNAL, f"its credits were not taken: {type(error).__name__}")
            raise


@asynccontextmanager
async def taking_computed(
    requests: AsyncIterator[Incoming], driver: Driver, request: PrefillRequest, entry: ProgressEntry | None
) -> AsyncGenerator[None, None]:
    """Takes "computed" beside the body, by message and from the credit page; raises afterwards what was wrong with it."""
    credits_taken = PageCredits(driver, request)
    if entry is not None:
        entry.listen(credits_taken.take)
    async with fed(computed_layers(requests, driver, request)):
        yield
    if credits_taken.error is not None:
        raise credits_taken.error


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

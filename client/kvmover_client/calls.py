"""The calls of the engine API that take a while, one class each. `AsyncClient` makes them."""

from __future__ import annotations

from kvmover_client.call import AnsweredCall, LayerCall, PlannedCall
from kvmover_client.errors import BadRequest
from kvmover_client.wire import block_result, prefix_from
from kvmover_client.words import Attached, BlockResult, FetchResult, Lease, Prefix, Stored, Whole
from kvmover_proto import engine_pb2


class FetchCall(AnsweredCall[engine_pb2.FetchEvent]):
    """Full Blocks into the pool under a lease, or into pages."""

    done_blocks: int = 0
    """Blocks whose outcome is known so far."""
    _result: FetchResult | None = None

    async def result(self, timeout_s: float | None = None) -> FetchResult:
        """One outcome per key, and the lease on those that are HIT."""
        return await self._until(lambda: self._result, "its result", timeout_s)

    def _apply(self, event: engine_pb2.FetchEvent) -> None:
        match event.WhichOneof("kind"):
            case "progress":
                self.done_blocks = max(self.done_blocks, event.progress.done_blocks)
            case "result":
                self._result = _fetch_result(event.result)
            case "end":
                self._terminal(event.end)
            case "quiet":
                self._became_quiet()


class StreamCall(
    PlannedCall[engine_pb2.StreamLayersRequest, engine_pb2.StreamEvent], LayerCall[engine_pb2.StreamEvent]
):
    """Prefill side: the hit prefix into pages, layer by layer."""

    _prefix: Prefix | None = None

    async def prefix(self, timeout_s: float | None = None) -> Prefix:
        """How much of the hit prefix is good; known before the first layer. Compute the rest."""
        return await self._until(lambda: self._prefix, "its prefix", timeout_s)

    async def computed(self, layers: int) -> None:
        """Needed only without a push. Raises `BadRequest` beyond the layers that are ready, see `PlannedCall` for others."""
        ready = self.ready_layers
        if layers > ready and not self.is_over:
            raise BadRequest(f"layers [0, {layers}) said to be computed, {ready} are ready")
        await super().computed(layers)

    def _computed_message(self, layers: int) -> engine_pb2.StreamLayersRequest:
        return engine_pb2.StreamLayersRequest(computed=engine_pb2.Computed(layers=layers))

    def _apply(self, event: engine_pb2.StreamEvent) -> None:
        match event.WhichOneof("kind"):
            case "prefix":
                self._prefix = prefix_from(event.prefix)
            case "ready":
                self._became_ready(event.ready)
            case "end":
                self._terminal(event.end)
            case "quiet":
                self._became_quiet()


class PushCall(PlannedCall[engine_pb2.PushLayersRequest, engine_pb2.PushEvent]):
    """Prefill side: computed layers out of pages into the decode node's buffer."""

    _pushed_layers = 0

    @property
    def pushed_layers(self) -> int:
        """Layers [0, n) have been applied there."""
        return self._pushed_layers if self._entry is None else max(self._pushed_layers, self._entry.layers)

    async def wait_pushed(self, layers: int, timeout_s: float | None = None) -> None:
        """Returns when layers [0, layers) have been applied in the decode node's buffer."""
        if self.pushed_layers < layers:
            await self._until(lambda: self.pushed_layers >= layers or None, f"{layers} layers were pushed", timeout_s)

    def _computed_message(self, layers: int) -> engine_pb2.PushLayersRequest:
        return engine_pb2.PushLayersRequest(computed=engine_pb2.Computed(layers=layers))

    def _apply(self, event: engine_pb2.PushEvent) -> None:
        match event.WhichOneof("kind"):
            case "pushed":
                self._pushed_layers = max(self._pushed_layers, event.pushed.layers)
            case "end":
                self._terminal(event.end)
            case "quiet":
                self._became_quiet()


class AssembleCall(AnsweredCall[engine_pb2.AssembleEvent]):
    """Decode side: a request's KV comes together in this node's buffer. Takes no pages."""

    _attached: Attached | None = None
    _whole: Whole | None = None
    _stored: Stored | None = None

    async def attached(self, timeout_s: float | None = None) -> Attached:
        """The prefill side has reserved."""
        return await self._until(lambda: self._attached, "the prefill side came", timeout_s)

    async def whole(self, timeout_s: float | None = None) -> Whole:
        """The buffer is whole: `deliver` may be called."""
        return await self._until(lambda: self._whole, "it was whole", timeout_s)

    async def stored(self, timeout_s: float | None = None) -> Stored:
        """After the delivery: what became of the prompt's new full blocks."""
        return await self._until(lambda: self._stored, "its blocks were stored", timeout_s)

    def _apply(self, event: engine_pb2.AssembleEvent) -> None:
        match event.WhichOneof("kind"):
            case "attached":
                told = event.attached
                self._attached = Attached(told.blocks, told.tail_tokens, told.prefill_node)
            case "whole":
                self._whole = Whole(event.whole.prefix_blocks)
            case "stored":
                self._stored = Stored(event.stored.durable_blocks, event.stored.dropped_blocks)
            case "end":
                self._terminal(event.end)


class DeliverCall(AnsweredCall[engine_pb2.DeliverEvent], LayerCall[engine_pb2.DeliverEvent]):
    """Decode side: a whole buffer into pages, layer by layer."""

    def _apply(self, event: engine_pb2.DeliverEvent) -> None:
        match event.WhichOneof("kind"):
            case "ready":
                self._became_ready(event.ready)
            case "end":
                self._terminal(event.end)
            case "quiet":
                self._became_quiet()


class StoreCall(AnsweredCall[engine_pb2.StoreEvent]):
    """Full blocks out of pages into storage."""

    _accepted: int | None = None
    _result: list[BlockResult] | None = None

    async def accepted(self, timeout_s: float | None = None) -> int:
        """Blocks that have been copied: their pages may be re-used."""
        return await self._until(lambda: self._accepted, "it was accepted", timeout_s)

    async def result(self, timeout_s: float | None = None) -> list[BlockResult]:
        """One outcome per key: HIT is durable."""
        return await self._until(lambda: self._result, "its result", timeout_s)

    def _apply(self, event: engine_pb2.StoreEvent) -> None:
        match event.WhichOneof("kind"):
            case "accepted":
                self._accepted = event.accepted.blocks
            case "result":
                self._result = [block_result(block) for block in event.result.blocks]
            case "end":
                self._terminal(event.end)
            case "quiet":
                self._became_quiet()


def _fetch_result(message: engine_pb2.FetchResult) -> FetchResult:
    lease = None
    if message.lease_id:
        lease = Lease(message.lease_id, message.lease_generation, message.lease_ms / 1000)
    return FetchResult(tuple(block_result(block) for block in message.blocks), lease)

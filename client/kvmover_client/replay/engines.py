"""The two engines: what a prefill and a decode engine do in one attempt at a request, with every byte checked."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmover_client import (
    ROOT,
    AsyncClient,
    BlockState,
    KvmoverError,
    Model,
    Plan,
    PushCall,
    Reason,
    StoreCall,
    StreamCall,
)
from kvmover_client.replay.engine import Call, Checked, Engine
from kvmover_client.replay.kv import Span
from kvmover_client.replay.mixing import Words
from kvmover_client.replay.request import Request
from kvmover_client.scheduling import ReadChoice

TIMEOUT_S = 120.0
SEEN_S, SEEN_POLL_S = 2.0, 0.02
STORES_UNDER_WAY_MAX = 8


async def wait_found(client: AsyncClient, model: Model, keys: Sequence[bytes]) -> None:
    """Until a look-up finds these, fails, or `SEEN_S` have passed: what other nodes store is seen here a little later."""
    until_s = time.monotonic() + SEEN_S
    while keys and time.monotonic() < until_s:
        try:
            looked = await client.lookup(model, keys)
        except KvmoverError:
            return  # the attempt that comes says why
        if looked.prefix_blocks == len(keys):
            return
        await asyncio.sleep(SEEN_POLL_S)


@dataclass(slots=True)
class Prefilled(Checked):
    """What the prefill engine saw: blocks found, blocks loaded, why the next one was not, and when layers were there."""

    found_blocks: int = 0
    hit_blocks: int = 0
    first_lost: str = ""
    loaded_bytes: int = 0
    first_layer_s: float = 0.0
    all_layers_s: float = 0.0
    ready_at_s: float = 0.0
    """When the last layer was there, loaded or computed, on the clock `time.perf_counter`."""


@dataclass(slots=True)
class Decoded(Checked):
    """What the decode engine saw; `durable_keys` are those of the blocks that the daemon called stored."""

    durable_keys: list[bytes] = field(default_factory=list)
    dropped_blocks: int = 0


class PrefillEngine(Engine):
    """Loads what is stored, computes the rest of the prompt layer by layer, pushes each layer to the decode node."""

    async def wait_found(self, keys: Sequence[bytes]) -> None:
        """As `wait_found`, at this engine's node."""
        await wait_found(self.client, self.model, keys)

    async def prefill(self, request: Request, attempt: int, decode_node: str, read: ReadChoice) -> Prefilled:
        """`read` says who reads what is hit. Raises `AttemptFailed`, `OutOfPages` and the errors of the client library."""
        keys = request.keys[: request.prompt_blocks]
        looked = await self.client.lookup(self.model, keys)
        seen = Prefilled(found_blocks=looked.prefix_blocks)
        hit_blocks = min(looked.prefix_blocks, request.hit_blocks_max)
        pages = await self.take(request.prompt_pages)
        calls: list[Call] = []
        try:
            plan = self._plan(request, attempt, decode_node, hit_blocks, read, pages)
            begun_s = time.perf_counter()
            stream = await self.client.stream_layers(plan) if hit_blocks else None
            calls += [stream] if stream else []
            push = await self.client.push_layers(plan)
            calls.append(push)
            if stream is None:
                await self._compute_layers(request, pages, seen, None, push)
            else:
                await self._load_and_compute(request, pages, seen, stream, push, begun_s)
            seen.ready_at_s = seen.ready_at_s or time.perf_counter()
            await self.over(push, "push")
        finally:
            await self.give_back(pages, calls)
        self.tokens_done += request.prompt_tokens
        return seen

    def _plan(
        self,
        request: Request,
        attempt: int,
        decode_node: str,
        hit_blocks: int,
        read: ReadChoice,
        pages: tuple[int, ...],
    ) -> Plan:
        shares = read.shares(0, hit_blocks)
        return Plan(
            request_id=request.request_id,
            attempt=attempt,
            fingerprint=self.model.fingerprint,
            block_keys=request.keys[: request.prompt_blocks],
            tail_tokens=request.tail_tokens,
            hit_blocks=hit_blocks,
            decode_node=decode_node,
            path=shares.path,
            parts=shares.parts,
            timeout_s=TIMEOUT_S,
            region_id=self.region.region_id,
            page_sets=(pages,),
        )

    async def _load_and_compute(
        self,
        request: Request,
        pages: Sequence[int],
        seen: Prefilled,
        stream: StreamCall,
        push: PushCall,
        begun_s: float,
    ) -> None:
        arrivals = asyncio.create_task(_arrivals(stream, self.kv.layer_count - 1))
        # When the stream fails, the computing below says so; the clock's own error adds nothing.
        arrivals.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            prefix = await stream.prefix()
            seen.hit_blocks = prefix.prefix_blocks
            if prefix.first_lost is not None:
                seen.first_lost = f": block {prefix.prefix_blocks} is lost, {prefix.first_lost.reason.name}"
            await self._compute_layers(request, pages, seen, stream, push)
            first_s, last_s = await arrivals
        finally:
            arrivals.cancel()
        seen.first_layer_s, seen.all_layers_s, seen.ready_at_s = first_s - begun_s, last_s - begun_s, last_s
        await self.over(stream, "stream")
        seen.loaded_bytes = seen.hit_blocks * self.model.block_bytes

    async def _compute_layers(
        self, request: Request, pages: Sequence[int], seen: Prefilled, stream: StreamCall | None, push: PushCall
    ) -> None:
        """Layer by layer: wait for its hits, check them, write the rows of the other tokens, let it be pushed."""
        hit_tokens = seen.hit_blocks * request.block_tokens
        hits = request.spans(pages, 0, hit_tokens)
        new = request.spans(pages, hit_tokens, request.prompt_tokens)
        for layer in range(self.kv.layer_count):
            if stream is not None:
                await stream.wait_layer(layer)
            await self.compute(self._compute_layer, layer, hits, new, request.chain, seen)
            await push.computed(layer + 1)

    def _compute_layer(
        self, layer: int, hits: Sequence[Span], new: Sequence[Span], chain: Words, seen: Prefilled
    ) -> None:
        self.check(f"prefill, layer {layer}", layer, hits, chain, seen)
        self.kv.fill(range(layer, layer + 1), new, chain)


class DecodeEngine(Engine):
    """Takes pages only when a request's KV is whole on its node, then goes on from there."""

    async def decode(self, request: Request, attempt: int, whole_now: Callable[[], object] = lambda: None) -> Decoded:
        """`whole_now` is called when the prefill engine is not needed any more.

        Raises `AttemptFailed`, `OutOfPages` and the errors of the client library."""
        seen = Decoded()
        assembly = await self.client.assemble_blocks(request.request_id, attempt, self.model, TIMEOUT_S)
        try:
            attached = await assembly.attached()
            if (attached.blocks, attached.tail_tokens) != (request.prompt_blocks, request.tail_tokens):
                seen.error(f"assembly of {attached.blocks} blocks and {attached.tail_tokens} tokens, not of the prompt")
            whole = await assembly.whole()
            whole_now()
            await self._take_over(request, attempt, seen)
            stored = await assembly.stored()
            await self.over(assembly, "assembly")
        finally:
            await self.give_back((), (assembly,))
        seen.dropped_blocks += stored.dropped_blocks
        if stored.durable_blocks + stored.dropped_blocks != request.prompt_blocks - whole.prefix_blocks:
            seen.error(
                f"{stored.durable_blocks} blocks of the prompt durable and {stored.dropped_blocks} dropped, "
                f"{request.prompt_blocks - whole.prefix_blocks} were new"
            )
        if not stored.dropped_blocks:
            seen.durable_keys += request.keys[: request.prompt_blocks]
        return seen

    async def _take_over(self, request: Request, attempt: int, seen: Decoded) -> None:
        """Delivery into pages, and the reply."""
        pages = await self.take(request.all_pages)
        calls: list[Call] = []
        try:
            deliver = await self.client.deliver(request.request_id, attempt, self.region, pages[: request.prompt_pages])
            calls.append(deliver)
            prompt = request.spans(pages, 0, request.prompt_tokens)
            for layer in range(self.kv.layer_count):
                await deliver.wait_layer(layer)
                await self.compute(self.check, f"decode, layer {layer}", layer, prompt, request.chain, seen)
            await self.over(deliver, "delivery")
            await self._generate(request, attempt, pages, calls, seen)
        finally:
            await self.give_back(pages, calls)

    async def _generate(
        self, request: Request, attempt: int, pages: tuple[int, ...], calls: list[Call], seen: Decoded
    ) -> None:
        """Writes the rows of the reply; each block that fills is stored at once."""
        under_way: deque[tuple[bytes, StoreCall]] = deque()
        first = request.prompt_tokens
        while first < len(request.chain):
            block = first // request.block_tokens
            end = min((block + 1) * request.block_tokens, len(request.chain))
            where = request.spans(pages, first, end)
            await self.compute(self.kv.fill, range(self.kv.layer_count), where, request.chain)
            if block < len(request.keys):
                call = await self._store(request, attempt, block, pages[block])
                calls.append(call)
                under_way.append((request.keys[block], call))
            if len(under_way) == STORES_UNDER_WAY_MAX:
                await self._stored(*under_way.popleft(), seen)
            first = end
        while under_way:
            await self._stored(*under_way.popleft(), seen)

    async def _store(self, request: Request, attempt: int, block: int, page: int) -> StoreCall:
        return await self.client.store_blocks(
            f"{request.request_id}/{block}",
            attempt,
            self.model,
            (request.keys[block],),
            request.keys[block - 1] if block else ROOT,
            block,
            self.region,
            (page,),
        )

    async def _stored(self, key: bytes, call: StoreCall, seen: Decoded) -> None:
        (result,) = await call.result()
        await call.end()
        if result.state is BlockState.HIT:
            seen.durable_keys.append(key)
        elif result.reason is Reason.DROPPED:
            seen.dropped_blocks += 1
        else:
            seen.error(f"a block of the reply was not stored: {result.reason.name}")


async def _arrivals(stream: StreamCall, last_layer: int) -> tuple[float, float]:
    """When the first and the last layer were there, whatever the engine was computing."""
    await stream.wait_layer(0)
    first_s = time.perf_counter()
    await stream.wait_layer(last_layer)
    return first_s, time.perf_counter()

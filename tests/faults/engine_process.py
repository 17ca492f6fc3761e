"""An engine in a process of its own that does what it is told, one JSON line each, and looks at every byte it is promised.

Its sessions ("pe", "de", "by") may be with different daemons. Each call is watched by a task: what is announced as ready is
compared with the pattern at once; once all calls of a request have ended and its pages are said to be quiet, they are
painted, and whoever writes there afterwards is found.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
from typing import Any

import numpy as np
from engine import LAYERS, LAYOUT, Engine, kv
from watched import Watched

from kvmover_client import ROOT, AsyncClient, BlockState, Part, Path, Reason, StreamCall
from kvmover_client.errors import KvmoverError, RequestEnded

CONNECT_S = 10.0
POLL_S = 0.01
LINE_BYTES_MAX = 1 << 20


class EngineProcess:
    """What the parent asks is a method `do_NAME`; the answer is its result."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.calls: dict[str, Watched] = {}
        self.groups: dict[str, list[Watched]] = {}
        self.not_made: dict[str, str] = {}
        self.pause_s = 0.0

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        tasks: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            number, name, options = json.loads(line)
            task = loop.create_task(self._answer(number, name, options))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _answer(self, number: int, name: str, options: dict[str, Any]) -> None:
        try:
            answer: dict[str, Any] = {"ok": await getattr(self, f"do_{name}")(**options)}
        except Exception as error:  # noqa: BLE001 - the parent decides what it means
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps([number, answer]), flush=True)

    async def do_connect(self, session: str, endpoint: str) -> None:
        """Opens a session, in place of the one of that name."""
        await self.do_close(session)
        made = Engine(await AsyncClient.connect(endpoint, name=session, timeout_s=CONNECT_S))
        await made.register()
        self.engines[session] = made

    async def do_close(self, session: str) -> None:
        known = self.engines.pop(session, None)
        if known is not None:
            await known.close()

    async def do_slow(self, pause_s: float) -> None:
        """From now on it takes its time before each thing that it says or asks for."""
        self.pause_s = pause_s

    async def do_cut(self, session: str) -> None:
        """The companion socket breaks."""
        self.engines[session].client._link.companion._sock.shutdown(socket.SHUT_RDWR)

    async def do_put(self, session: str, name: str, blocks: int) -> None:
        """Stores a chain, durably."""
        made = self.engines[session]
        await made.store(f"put {name}", made.keys(name, blocks))

    async def do_store(self, session: str, call: str, request: str, chain: str, blocks: int, **options: Any) -> None:
        made = self.engines[session]
        keys, first = made.keys(chain, blocks), options.pop("first_page", 0)
        made.fill(keys, first)
        pages = range(first, first + blocks)
        found = await made.client.store_blocks(
            request, options.pop("attempt", 1), made.model, keys, ROOT, 0, made.region, pages, **options
        )
        self._track(call, request, Watched(found, made, call))

    async def do_fetch(self, session: str, call: str, request: str, chain: str, blocks: int, **options: Any) -> None:
        """Into pages from `first_page` on, or without one into the pool."""
        made = self.engines[session]
        keys, first = made.keys(chain, blocks), options.pop("first_page", None)
        pages = [] if first is None else list(range(first, first + blocks))
        region = None if first is None else made.region
        found = await made.client.fetch_blocks(
            request, options.pop("attempt", 1), made.model, keys, region=region, pages=pages, **options
        )
        watched = Watched(found, made, call)
        watched.keys, watched.pages = keys, pages
        self._track(call, request, watched)
        self._spawn(watched, self._check_fetch(watched))

    async def _check_fetch(self, watched: Watched) -> None:
        await watched.over.wait()
        if watched.end != "OK" or not watched.pages:
            return
        result = await watched.call.result()  # type: ignore[attr-defined]
        for block, told in enumerate(result.blocks):
            if told.state is BlockState.HIT:
                for layer in range(LAYERS):
                    if not np.array_equal(watched.view(layer, watched.pages[block]), kv(watched.keys[block], layer)):
                        watched.wrong.append(f"{watched.name}: layer {layer} of block {block} is HIT with wrong bytes")

    def _plan(self, made: Engine, request: str, keys: list[bytes], options: dict[str, Any]) -> Any:
        parts = [Part(node, ((first, stop),)) for node, first, stop in options.pop("parts", ())]
        return made.plan(request, keys, parts=parts, **(options | {"path": Path[options.get("path", "PE")]}))

    async def do_stream(self, session: str, call: str, request: str, keys: list[list[Any]], **options: Any) -> None:
        """`keys`: (chain, first, last) of each part of the prompt's chain. With a ring, layers wait to be computed."""
        made = self.engines[session]
        plan = self._plan(made, request, self._keys(made, keys), options)
        watched = Watched(await made.client.stream_layers(plan), made, call)
        watched.keys, watched.ring = list(plan.block_keys), bool(options.get("ring_sets"))
        watched.page_sets = [list(pages) for pages in plan.page_sets]
        watched.pages = sorted({page for pages in plan.page_sets for page in pages[: plan.hit_blocks]})
        self._track(call, request, watched)
        self._spawn(watched, self._check_layers(watched, watched.page_sets, None))

    async def do_push(
        self, session: str, call: str, request: str, keys: list[list[Any]], computed: int = 0, **options: Any
    ) -> None:
        """The blocks behind the hits are there from the beginning, and so are all layers up to `computed`."""
        made = self.engines[session]
        plan = self._plan(made, request, self._keys(made, keys), options)
        found = await made.client.push_layers(plan)
        self._track(call, request, Watched(found, made, call))
        if not options.get("ring_sets"):
            first = plan.hit_blocks + options.get("first_page", 0)
            made.fill(plan.block_keys[plan.hit_blocks :], first)
        if computed:
            await found.computed(computed)

    async def do_compute(self, push: str, stream: str = "") -> None:
        """Says "computed" for each layer as it is ready, to the last; beside the parent's other questions."""
        pushing = self.calls[push]
        streaming = self.calls[stream] if stream else None
        self._spawn(pushing, self._compute(pushing, streaming))

    async def _compute(self, pushing: Watched, streaming: Watched | None) -> None:
        try:
            for layer in range(LAYERS):
                if isinstance(streaming and streaming.call, StreamCall):
                    prefix = (await streaming.call.prefix()).prefix_blocks  # type: ignore[union-attr]
                    await streaming.call.wait_layer(layer)  # type: ignore[union-attr]
                    await self._looked_at(streaming, layer)  # type: ignore[arg-type]
                    self._fill_from(streaming, prefix, layer)  # type: ignore[arg-type]
                await asyncio.sleep(self.pause_s)
                await pushing.call.computed(layer + 1)  # type: ignore[attr-defined]
        except KvmoverError as error:
            pushing.message = pushing.message or str(error)

    async def _looked_at(self, streaming: Watched, layer: int) -> None:
        """A layer that is said to be computed may be overwritten at once."""
        while streaming.checked_layers <= layer and not streaming.over.is_set():  # noqa: ASYNC110 - two things may end it
            await asyncio.sleep(0)

    def _fill_from(self, streaming: Watched, prefix: int, layer: int) -> None:
        """Computes the blocks behind the prefix."""
        pages = streaming.page_sets[layer % len(streaming.page_sets)]
        for block in range(prefix, len(streaming.keys)):
            streaming.view(layer, pages[block])[:] = kv(streaming.keys[block], layer)

    async def do_assemble(
        self, session: str, call: str, request: str, attempt: int = 1, timeout_s: float = 8.0
    ) -> None:
        made = self.engines[session]
        found = await made.client.assemble_blocks(request, attempt, made.model, timeout_s)
        self._track(call, request, Watched(found, made, call))

    async def do_deliver(
        self, session: str, call: str, request: str, keys: list[list[Any]], first_page: int = 0, attempt: int = 1
    ) -> None:
        made = self.engines[session]
        block_keys = self._keys(made, keys)
        pages = list(range(first_page, first_page + len(block_keys)))
        watched = Watched(await made.client.deliver(request, attempt, made.region, pages, 8.0), made, call)
        watched.keys, watched.pages = block_keys, pages
        self._track(call, request, watched)
        self._spawn(watched, self._check_layers(watched, [pages], len(pages)))

    async def do_deliver_when_whole(self, assembly: str, call: str, request: str, **options: Any) -> None:
        """Beside the parent's other questions; without a call when the assembly ends before it is whole."""
        waiting = self.calls[assembly]
        self._spawn(waiting, self._deliver(waiting, {"call": call, "request": request} | options))

    async def _deliver(self, waiting: Watched, options: dict[str, Any]) -> None:
        try:
            await waiting.call.whole()  # type: ignore[attr-defined]
            await asyncio.sleep(self.pause_s)
            await self.do_deliver(**options)
        except Exception as error:  # noqa: BLE001 - the parent decides what it means
            self.not_made[options["call"]] = f"{type(error).__name__}: {error}"

    async def _check_layers(self, watched: Watched, page_sets: list[list[int]], blocks: int | None) -> None:
        """Each layer, as soon as it is said to be ready; `blocks` None: those of the stream's prefix."""
        call: Any = watched.call
        try:
            for layer in range(LAYERS):
                await call.wait_layer(layer)
                count = blocks if blocks is not None else (await call.prefix()).prefix_blocks
                watched.check(layer, count, page_sets[layer % len(page_sets)])
                watched.checked_layers = layer + 1
        except (RequestEnded, KvmoverError):
            return

    def _keys(self, made: Engine, parts: list[list[Any]]) -> list[bytes]:
        return [key for chain, first, last in parts for key in made.keys(chain, last)[first:]]

    def _track(self, call: str, request: str, watched: Watched) -> None:
        self.calls[call] = watched
        self.groups.setdefault(f"{id(watched.owner)} {request}", []).append(watched)
        self._spawn(watched, watched.watch())
        self._spawn(watched, self._paint_when_quiet(watched, f"{id(watched.owner)} {request}"))

    async def _paint_when_quiet(self, watched: Watched, group: str) -> None:
        """Pages are the engine's again once every call of the request that may use them is over and quiet."""
        await watched.over.wait()
        for other in self.groups[group]:
            await other.over.wait()
            if other.end not in ("OK",) and not other.pages_quiet:
                await other.quiet.wait()
        for other in self.groups[group]:
            if other.pages and not other.painted and all(known.over.is_set() for known in self.groups[group]):
                await asyncio.sleep(0)
                other.paint()

    def _spawn(self, watched: Watched, work: Any) -> None:
        watched.tasks.append(asyncio.get_running_loop().create_task(work))

    async def do_layer(self, call: str, layer: int, timeout_s: float) -> None:
        await self.calls[call].call.wait_layer(layer, timeout_s)  # type: ignore[attr-defined]

    async def do_event(self, call: str, event: str, timeout_s: float) -> None:
        """Waits for "attached", "whole", "accepted", "result", "prefix" or "stored"."""
        await getattr(self.calls[call].call, event)(timeout_s)

    async def do_cancel(self, call: str) -> int:
        watched = self.calls[call]
        return await watched.owner.client.cancel(watched.call.request_id, watched.call.attempt, timeout_s=3.0)

    async def do_give_up(self, call: str) -> None:
        """The engine's own patience ends: the call is dropped without a word."""
        running = self.calls[call].call._running
        if running is not None:
            running.cancel()

    async def do_end(self, call: str, timeout_s: float) -> dict[str, Any]:
        """How a call has ended, once it has; `end` empty when it did not within the time, NotMade when it had no chance."""
        try:
            async with asyncio.timeout(timeout_s):
                while call not in self.calls:
                    if call in self.not_made:
                        return {"end": "NotMade", "message": self.not_made[call], "wrong": []}
                    await asyncio.sleep(POLL_S)
                await self.calls[call].over.wait()
        except TimeoutError:
            if call not in self.calls:
                return {"end": "", "message": "was never made", "wrong": []}
        return self.calls[call].told()

    async def do_quiet(self, call: str, timeout_s: float) -> bool:
        """True when the pages are said to be quiet, or it can't be heard any more."""
        watched = self.calls.get(call)
        if watched is None or watched.is_deaf or watched.pages_quiet:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                while not (watched.quiet.is_set() or watched.is_deaf):  # noqa: ASYNC110 - two things may end it
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return False
        return True

    async def do_verify(self, session: str, chain: str, blocks: int, first_page: int = 60) -> list[str]:
        """Whatever a look-up finds of a chain is fetched and looked at."""
        made = self.engines[session]
        keys = made.keys(chain, blocks)
        found = (await made.client.lookup(made.model, keys)).prefix_blocks
        if not found:
            return []
        pages = range(first_page, first_page + found)
        call = await made.client.fetch_blocks(
            f"verify {chain}", 1, made.model, keys[:found], region=made.region, pages=pages, timeout_s=8.0
        )
        result, end = await call.result(), await call.end()
        wrong = [] if end.reason is Reason.OK else [f"{chain}: stored blocks can't be fetched: {end}"]
        for block, told in enumerate(result.blocks):
            if told.state is not BlockState.HIT:
                wrong.append(f"{chain}: block {block} was found and is {told}")
                continue
            wrong += [
                f"{chain}: layer {layer} of stored block {block} is wrong"
                for layer in range(LAYERS)
                if not np.array_equal(made.region.page_view(layer, 0, first_page + block), kv(keys[block], layer))
            ]
        return wrong

    async def do_over(self) -> list[str]:
        """What was found wrong in any page; then all calls are forgotten."""
        found = [text for watched in self.calls.values() for text in watched.wrong]
        found += [text for watched in self.calls.values() if watched.painted for text in watched.late_writes()]
        for watched in self.calls.values():
            for task in watched.tasks:
                task.cancel()
        self.calls.clear()
        self.groups.clear()
        self.not_made.clear()
        gc.collect()  # a channel that is closed keeps its connection as long as anything refers to one of its calls
        return found


if __name__ == "__main__":
    assert LAYOUT.layer_count == LAYERS
    asyncio.run(EngineProcess().serve())

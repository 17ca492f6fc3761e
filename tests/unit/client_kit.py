"""A small daemon that plays scripts: the real companion server, and a real gRPC server whose calls follow the request's name.

The part of a request id before "/" says what happens: "plain", "hang", "cut", "unquiet", "stale", "silent", "gap", "broken",
"stopped".
Run as `python client_kit.py SOCKET` it is a process of its own, which tests may kill.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import grpc.aio

from kvmover_proto import common_pb2, engine_pb2, engine_pb2_grpc
from kvmoverd.core.errors import KvmoverError, StaleAttempt, UnknownSession
from kvmoverd.ports.progress import SharedPages
from kvmoverd.rpc.companion import CompanionServer, SessionPeer
from kvmoverd.rpc.errors import to_status

LAYERS = 4
TOKEN_KEY = "kvmover-session-bin"
Context = grpc.aio.ServicerContext[Any, Any]


def terminal(reason: int = common_pb2.OK, *, quiet: bool = True, prefix_blocks: int = 0) -> common_pb2.Terminal:
    number = common_pb2.Reason.ValueType(reason)
    status = common_pb2.Status(reason=number, message="as scripted", retryable=reason == common_pb2.PREFIX_CUT)
    return common_pb2.Terminal(
        status=status, pages_quiet=quiet, prefix_blocks=prefix_blocks, moved_bytes=7, storage_read_bytes=5
    )


def block(state: int, reason: int) -> common_pb2.BlockStatus:
    return common_pb2.BlockStatus(
        state=common_pb2.BlockState.ValueType(state), reason=common_pb2.Reason.ValueType(reason)
    )


class Sessions:
    """Hooks of the companion server."""

    def __init__(self) -> None:
        self.tokens: dict[str, bytes] = {}
        self.ended: list[tuple[str, str]] = []
        self.file_sizes: dict[int, int] = {}
        self.fd_refusal: KvmoverError | None = None

    def opened(self, peer: SessionPeer) -> tuple[str, bytes]:
        session_id = f"s{len(self.tokens) + len(self.ended) + 1}"
        self.tokens[session_id] = os.urandom(32)
        return session_id, self.tokens[session_id]

    def progress_pages(self, session_id: str) -> SharedPages | None:
        return None

    def fd_received(self, session_id: str, fd: int, label: str) -> int:
        if self.fd_refusal is not None:
            raise self.fd_refusal
        ticket = 100 + len(self.file_sizes)
        self.file_sizes[ticket] = os.fstat(fd).st_size
        return ticket

    def closed(self, session_id: str, why: str) -> None:
        del self.tokens[session_id]
        self.ended.append((session_id, why))


class ScriptedEngine(engine_pb2_grpc.EngineServicer):
    """Keeps every request message; cancelled requests end with CANCELLED."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.seen: list[Any] = []
        self.refusal: KvmoverError | None = None
        self.cancelled: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.running: set[str] = set()

    async def RegisterModel(
        self, request: engine_pb2.RegisterModelRequest, context: Context
    ) -> engine_pb2.RegisterModelReply:
        await self._check(request, context)
        if request.manifest.model_id == "slow":
            await asyncio.sleep(30)
        digest = hashlib.blake2b(request.manifest.SerializeToString(), digest_size=32).digest()
        layers = request.manifest.layout.layers
        block_bytes = sum(sum(layer.segment_bytes) for layer in layers)
        return engine_pb2.RegisterModelReply(fingerprint=digest, block_bytes=block_bytes, slots_max=9)

    async def BumpEpoch(self, request: engine_pb2.BumpEpochRequest, context: Context) -> engine_pb2.BumpEpochReply:
        await self._check(request, context)
        return engine_pb2.BumpEpochReply(epoch=4, fingerprint=request.fingerprint[::-1])

    async def PurgeNamespace(
        self, request: engine_pb2.PurgeNamespaceRequest, context: Context
    ) -> engine_pb2.PurgeNamespaceReply:
        await self._check(request, context)
        return engine_pb2.PurgeNamespaceReply(purged_bytes=4096, purged_blocks=2)

    async def PurgeTenant(
        self, request: engine_pb2.PurgeTenantRequest, context: Context
    ) -> engine_pb2.PurgeTenantReply:
        await self._check(request, context)
        return engine_pb2.PurgeTenantReply(purged_bytes=4096 * len(request.tenant), purged_blocks=2)

    async def RegisterRegion(
        self, request: engine_pb2.RegisterRegionRequest, context: Context
    ) -> engine_pb2.RegisterRegionReply:
        await self._check(request, context)
        pages = request.layers[0].segments[0].pages
        return engine_pb2.RegisterRegionReply(region_id=request.fd_ticket, pages=pages, pages_per_block=1)

    async def UnregisterRegion(
        self, request: engine_pb2.UnregisterRegionRequest, context: Context
    ) -> engine_pb2.UnregisterRegionReply:
        await self._check(request, context)
        return engine_pb2.UnregisterRegionReply(pages_quiet=True)

    async def Lookup(self, request: engine_pb2.LookupRequest, context: Context) -> engine_pb2.LookupReply:
        await self._check(request, context)
        return engine_pb2.LookupReply(prefix_blocks=len(request.block_keys) // 32, pooled_blocks=1)

    async def Prefetch(self, request: engine_pb2.PrefetchRequest, context: Context) -> engine_pb2.PrefetchReply:
        await self._check(request, context)
        return engine_pb2.PrefetchReply(accepted_blocks=len(request.block_keys) // 32)

    async def Pin(self, request: engine_pb2.PinRequest, context: Context) -> engine_pb2.PinReply:
        await self._check(request, context)
        return engine_pb2.PinReply(pinned_blocks=request.pin_ms)

    async def Renew(self, request: engine_pb2.RenewRequest, context: Context) -> engine_pb2.RenewReply:
        await self._check(request, context)
        return engine_pb2.RenewReply(renewed=[lease.lease_id == 1 for lease in request.leases])

    async def Release(self, request: engine_pb2.ReleaseRequest, context: Context) -> engine_pb2.ReleaseReply:
        await self._check(request, context)
        return engine_pb2.ReleaseReply(released=len(request.leases))

    async def Cancel(self, request: engine_pb2.CancelRequest, context: Context) -> engine_pb2.CancelReply:
        await self._check(request, context)
        known = request.request_id in self.running
        if known:
            self.cancelled[request.request_id].set()
        return engine_pb2.CancelReply(cancelled_calls=int(known))

    async def NodeStatus(self, request: engine_pb2.NodeStatusRequest, context: Context) -> engine_pb2.NodeStatusReply:
        return engine_pb2.NodeStatusReply(node="scripted", sessions=len(self.sessions.tokens))

    async def Drain(self, request: engine_pb2.DrainRequest, context: Context) -> engine_pb2.DrainReply:
        return engine_pb2.DrainReply(running_requests=3)

    async def FetchBlocks(
        self, request: engine_pb2.FetchBlocksRequest, context: Context
    ) -> AsyncIterator[engine_pb2.FetchEvent]:
        await self._check(request, context)
        yield engine_pb2.FetchEvent(progress=engine_pb2.FetchProgress(done_blocks=1))
        if (ended := await self._ended(request.request_id)) is None:
            blocks = [block(common_pb2.HIT, common_pb2.OK), block(common_pb2.FAILED, 99)]
            result = engine_pb2.FetchResult(blocks=blocks, lease_id=1, lease_generation=2, lease_ms=1500)
            yield engine_pb2.FetchEvent(result=result)
        for end in [terminal()] if ended is None else ended:
            yield _either(engine_pb2.FetchEvent, end)

    async def StreamLayers(
        self, requests: AsyncIterator[engine_pb2.StreamLayersRequest], context: Context
    ) -> AsyncIterator[engine_pb2.StreamEvent]:
        plan = (await anext(requests)).plan
        await self._check(plan, context)
        if plan.request_id.startswith("gap"):
            yield engine_pb2.StreamEvent(ready=engine_pb2.Ready(first_layer=1, last_layer=1))
        lost = block(common_pb2.FAILED, common_pb2.CORRUPT) if plan.request_id.startswith("cut") else None
        yield engine_pb2.StreamEvent(prefix=engine_pb2.Prefix(prefix_blocks=plan.hit_blocks, first_lost=lost))
        yield engine_pb2.StreamEvent(ready=engine_pb2.Ready(first_layer=0, last_layer=1))
        if (ended := await self._ended(plan.request_id)) is None:
            if not plan.decode_node:
                self.seen.append((await anext(requests)).computed)
            yield engine_pb2.StreamEvent(ready=engine_pb2.Ready(first_layer=2, last_layer=LAYERS - 1))
        for end in [terminal(prefix_blocks=plan.hit_blocks)] if ended is None else ended:
            yield _either(engine_pb2.StreamEvent, end)

    async def PushLayers(
        self, requests: AsyncIterator[engine_pb2.PushLayersRequest], context: Context
    ) -> AsyncIterator[engine_pb2.PushEvent]:
        plan = (await anext(requests)).plan
        await self._check(plan, context)
        if (ended := await self._ended(plan.request_id)) is None:
            pushed = 0
            while pushed < LAYERS:
                pushed = (await anext(requests)).computed.layers
                yield engine_pb2.PushEvent(pushed=engine_pb2.Pushed(layers=pushed))
        for end in [terminal()] if ended is None else ended:
            yield _either(engine_pb2.PushEvent, end)

    async def AssembleBlocks(
        self, request: engine_pb2.AssembleBlocksRequest, context: Context
    ) -> AsyncIterator[engine_pb2.AssembleEvent]:
        await self._check(request, context)
        attached = engine_pb2.Attached(blocks=3, tail_tokens=1, prefill_node="pe")
        yield engine_pb2.AssembleEvent(attached=attached)
        if (ended := await self._ended(request.request_id)) is None:
            yield engine_pb2.AssembleEvent(whole=engine_pb2.Whole(prefix_blocks=2))
            yield engine_pb2.AssembleEvent(stored=engine_pb2.Stored(durable_blocks=1, dropped_blocks=0))
        for end in [terminal()] if ended is None else ended:
            yield _either(engine_pb2.AssembleEvent, end)

    async def Deliver(
        self, request: engine_pb2.DeliverRequest, context: Context
    ) -> AsyncIterator[engine_pb2.DeliverEvent]:
        await self._check(request, context)
        if (ended := await self._ended(request.request_id)) is None:
            yield engine_pb2.DeliverEvent(ready=engine_pb2.Ready(first_layer=0, last_layer=LAYERS - 1))
        for end in [terminal()] if ended is None else ended:
            yield _either(engine_pb2.DeliverEvent, end)

    async def StoreBlocks(
        self, request: engine_pb2.StoreBlocksRequest, context: Context
    ) -> AsyncIterator[engine_pb2.StoreEvent]:
        await self._check(request, context)
        yield engine_pb2.StoreEvent(accepted=engine_pb2.Accepted(blocks=2))
        if (ended := await self._ended(request.request_id)) is None:
            blocks = [block(common_pb2.HIT, common_pb2.OK), block(common_pb2.FAILED, common_pb2.DROPPED)]
            yield engine_pb2.StoreEvent(result=engine_pb2.StoreResult(blocks=blocks))
        for end in [terminal()] if ended is None else ended:
            yield _either(engine_pb2.StoreEvent, end)

    async def _check(self, request: Any, context: Context) -> None:
        self.seen.append(request)
        tokens = [value for key, value in context.invocation_metadata() or () if key == TOKEN_KEY]
        if not tokens or tokens[0] not in self.sessions.tokens.values():
            await context.abort_with_status(to_status(UnknownSession("no live session has this token")))
        if self.refusal is not None:
            await context.abort_with_status(to_status(self.refusal))
        match getattr(request, "request_id", "").partition("/")[0]:
            case "broken":
                await context.abort(grpc.StatusCode.INTERNAL, "Internal error from Core")
            case "stopped":
                await context.abort(grpc.StatusCode.CANCELLED, "")
        if getattr(request, "request_id", "").startswith("stale"):
            stale = StaleAttempt(request_id=request.request_id, attempt=request.attempt, known=8)
            await context.abort_with_status(to_status(stale))

    async def _ended(self, request_id: str) -> list[common_pb2.Terminal | common_pb2.Quiet] | None:
        """The end that the request's name asks for; None: it goes on."""
        self.running.add(request_id)
        match request_id.partition("/")[0]:
            case "cut":
                return [terminal(common_pb2.PREFIX_CUT, prefix_blocks=2)]
            case "unquiet":
                return [terminal(common_pb2.DEADLINE, quiet=False), common_pb2.Quiet()]
            case "silent":
                return []
            case "hang":
                await self.cancelled[request_id].wait()
                return [terminal(common_pb2.CANCELLED)]
            case _:
                return None


def _either(event: Any, end: common_pb2.Terminal | common_pb2.Quiet) -> Any:
    return event(end=end) if isinstance(end, common_pb2.Terminal) else event(quiet=end)


class ScriptedDaemon:
    """Companion server and engine API at one path."""

    calls_max = 32

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sessions = Sessions()
        self.engine = ScriptedEngine(self.sessions)
        self.companion = CompanionServer(
            f"{path}.companion",
            self.sessions,
            boot_id=os.urandom(4).hex(),
            version="0",
            engine_endpoint=self.endpoint,
            connections_max=8,
            mode=0o600,
        )

    @property
    def endpoint(self) -> str:
        return f"unix://{self.path}"

    async def start(self) -> Self:
        await self.companion.start()
        self._server = grpc.aio.server(maximum_concurrent_rpcs=self.calls_max)
        engine_pb2_grpc.add_EngineServicer_to_server(self.engine, self._server)
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        await self.companion.stop()
        await self._server.stop(0)


async def _serve_until_killed(path: Path) -> None:
    daemon = await ScriptedDaemon(path).start()
    print("serving", flush=True)
    # A server that nobody refers to is collected; and one whose test died must not stay for ever.
    await asyncio.sleep(300)
    await daemon.stop()


if __name__ == "__main__":
    asyncio.run(_serve_until_killed(Path(sys.argv[1])))

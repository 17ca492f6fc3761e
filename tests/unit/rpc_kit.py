"""A real daemon in the test's own loop: small pool, memory storage, real sockets. And raw hands on both of its APIs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvmover_client import wire
from kvmover_client.companion import Companion, Welcome
from kvmover_client.memory import Geometry, RegionMemory, paged_geometry
from kvmover_client.words import Layout as ClientLayout
from kvmover_proto import common_pb2, engine_pb2, engine_pb2_grpc, node_pb2, node_pb2_grpc
from kvmoverd.config import parse
from kvmoverd.core.admission import Purpose
from kvmoverd.core.keys import ROOT, block_key
from kvmoverd.daemon import Daemon

WAIT_S = 5.0
PIECE_BYTES = 2 << 20
TOKENS, LAYERS, SEGMENTS = 4, 3, (48, 20)
HERE, THERE = "here", "there"
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
SESSION_KEY = "kvmover-session-bin"


def layout() -> common_pb2.Layout:
    layer = common_pb2.LayerSpec(segment_bytes=SEGMENTS)
    return common_pb2.Layout(block_tokens=TOKENS, layers=[layer] * LAYERS)


def manifest(**changed: Any) -> common_pb2.Manifest:
    fields = {
        "model_id": "model",
        "weights_digest": b"w" * 32,
        "tokenizer_digest": b"t" * 32,
        "layout": layout(),
        "dtype": "u8",
        "parallel_geometry": "replicated",
    }
    return common_pb2.Manifest(**{name: value for name, value in (fields | changed).items() if value is not None})


def keys_of(fingerprint: bytes, blocks: int, salt: int = 0) -> list[bytes]:
    """A chain of block keys."""
    found, parent = [], ROOT
    for number in range(blocks):
        parent = block_key(fingerprint, parent, [salt, number])
        found.append(parent)
    return found


@dataclass(frozen=True)
class Refusal:
    """How a call failed: what a client sees of it."""

    code: grpc.StatusCode
    reason: str
    message: str
    facts: dict[str, str]

    @property
    def retryable(self) -> bool:
        return self.facts["retryable"] == "true"


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    status = rpc_status.from_call(error)
    assert status is not None, f"{error.code()} {error.details()}: no rich status"
    (detail,) = status.details
    info = error_details_pb2.ErrorInfo()
    assert detail.Unpack(info)
    assert info.domain == "kvmoverd"
    assert {"retryable", "remedy"} <= set(info.metadata)
    return Refusal(error.code(), info.reason, status.message, dict(info.metadata))


async def events_of(call: Any) -> AsyncIterator[Any]:
    """What is left of a call's events; may be begun anew after some were read. Raises what the call failed with."""
    async with asyncio.timeout(WAIT_S):
        while (event := await call.read()) is not grpc.aio.EOF:
            yield event


async def refused(call: Any) -> Refusal:
    """The refusal of a call of any kind; fails when it was answered."""
    try:
        async with asyncio.timeout(WAIT_S):
            answers = [event async for event in events_of(call)] if hasattr(call, "read") else await call
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    raise AssertionError(f"not refused: {answers}")


async def end_of(call: Any) -> common_pb2.Terminal:
    """Reads a stream to its end; its only Terminal."""
    ends = [event.end async for event in events_of(call) if event.WhichOneof("kind") == "end"]
    assert len(ends) == 1, ends
    return ends[0]


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - the books tell nobody when they change
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(what) from None


@dataclass
class Engine:
    """One engine: its companion socket, its token, a model and one paged region."""

    kit: Kit
    companion: Companion
    welcome: Welcome
    fingerprint: bytes = b""
    region_id: int = 0
    pages: int = 0
    geometry: Geometry | None = None
    memories: list[RegionMemory] = field(default_factory=list)

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((SESSION_KEY, self.welcome.session_token),)

    def ask(self, method: str, request: Any = None, *, timeout_s: float = WAIT_S) -> Any:
        """Begins a call with this session's token; for streams of requests pass an iterator, or None to write later."""
        call = getattr(self.kit.engine_stub, method)
        if request is None:
            return call(timeout=timeout_s, metadata=self.metadata)
        return call(request, timeout=timeout_s, metadata=self.metadata)

    async def register(self, pages: int = 32, **changed: Any) -> Engine:
        """The usual model, but for what is `changed`, and a region of `pages` pages, one page a block."""
        reply = await self.ask("RegisterModel", engine_pb2.RegisterModelRequest(manifest=manifest(**changed)))
        self.fingerprint = reply.fingerprint
        self.geometry = paged_geometry(ClientLayout(TOKENS, (SEGMENTS,) * LAYERS), pages)
        ticket = await self.pass_fd(self.geometry.size_bytes)
        request = engine_pb2.RegisterRegionRequest(
            fd_ticket=ticket, fingerprint=self.fingerprint, layers=wire.region_layers(self.geometry)
        )
        region = await self.ask("RegisterRegion", request)
        self.region_id, self.pages = region.region_id, region.pages
        return self

    async def pass_fd(self, size_bytes: int) -> int:
        memory = RegionMemory.create(size_bytes, "test")
        self.memories.append(memory)
        return await self.companion.pass_fd(memory.fileno(), "test", WAIT_S)

    def plan(self, request_id: str, *, blocks: int = 2, **changed: Any) -> engine_pb2.RequestPlan:
        """A plan that would be taken: `blocks` full blocks, nothing hit, this node decodes too."""
        fields: dict[str, Any] = {
            "request_id": request_id,
            "attempt": 1,
            "fingerprint": self.fingerprint,
            "block_keys": b"".join(keys_of(self.fingerprint, blocks)),
            "decode_node": HERE,
            "path": common_pb2.PATH_PE,
            "region_id": self.region_id,
            "page_sets": [common_pb2.PageSet(pages=range(blocks))],
        }
        return engine_pb2.RequestPlan(**(fields | changed))

    def stream(self, plan: engine_pb2.RequestPlan, *computed: int) -> Any:
        return self.ask("StreamLayers", _messages(engine_pb2.StreamLayersRequest, plan, computed))

    def push(self, plan: engine_pb2.RequestPlan, *computed: int) -> Any:
        return self.ask("PushLayers", _messages(engine_pb2.PushLayersRequest, plan, computed))

    def assemble(self, request_id: str, **changed: Any) -> Any:
        fields = {"request_id": request_id, "attempt": 1, "fingerprint": self.fingerprint}
        return self.ask("AssembleBlocks", engine_pb2.AssembleBlocksRequest(**(fields | changed)))

    def fetch_request(self, request_id: str, **changed: Any) -> engine_pb2.FetchBlocksRequest:
        keys = b"".join(keys_of(self.fingerprint, 2))
        fields = {"request_id": request_id, "attempt": 1, "fingerprint": self.fingerprint, "block_keys": keys}
        return engine_pb2.FetchBlocksRequest(**(fields | changed))

    def store_request(self, request_id: str, *, blocks: int = 2, **changed: Any) -> engine_pb2.StoreBlocksRequest:
        fields: dict[str, Any] = {
            "request_id": request_id,
            "attempt": 1,
            "fingerprint": self.fingerprint,
            "block_keys": b"".join(keys_of(self.fingerprint, blocks)),
            "parent_key": ROOT,
            "region_id": self.region_id,
            "pages": common_pb2.PageSet(pages=range(blocks)),
        }
        return engine_pb2.StoreBlocksRequest(**(fields | changed))

    async def store(self, blocks: int) -> None:
        """Makes the first `blocks` blocks of the usual chain durable."""
        end = await end_of(self.ask("StoreBlocks", self.store_request(f"store-{next(self.kit.ids)}", blocks=blocks)))
        assert end.status.reason == common_pb2.OK, end

    def close(self) -> None:
        self.companion.close()
        for memory in self.memories:
            memory.close()


def _messages(kind: Any, plan: engine_pb2.RequestPlan, computed: tuple[int, ...]) -> Iterator[Any]:
    yield kind(plan=plan)
    for layers in computed:
        yield kind(computed=engine_pb2.Computed(layers=layers))


class Kit:
    """A daemon that runs, and raw stubs on its two servers."""

    def __init__(self, daemon: Daemon, home: Path, node_port: int) -> None:
        self.daemon = daemon
        self.node = daemon.node
        self.socket = daemon.config.engine_api.socket
        self.home = home
        self.ids = itertools.count(1)
        self.node_channel = grpc.aio.insecure_channel(f"127.0.0.1:{node_port}", options=OPTIONS)
        self.node_stub: Any = node_pb2_grpc.NodeStub(self.node_channel)
        self.watches: dict[tuple[str, str], Any] = {}
        self._engines: list[Engine] = []
        self.reconnect()

    def reconnect(self) -> None:
        """A new connection to the engine API."""
        self.engine_channel = grpc.aio.insecure_channel(f"unix:{self.socket}", options=OPTIONS)
        self.engine_stub: Any = engine_pb2_grpc.EngineStub(self.engine_channel)

    async def connect(self) -> Engine:
        """An engine with a session and nothing else."""
        loop = asyncio.get_running_loop()
        companion = await Companion.connect(f"{self.socket}.companion", lambda why: None, loop.time() + WAIT_S)
        engine = Engine(self, companion, await companion.hello("test", WAIT_S))
        self._engines.append(engine)
        return engine

    async def engine(self, pages: int = 32) -> Engine:
        """An engine with a model and a region."""
        return await (await self.connect()).register(pages)

    def ask_node(self, method: str, request: Any, *, timeout_s: float = WAIT_S) -> Any:
        return getattr(self.node_stub, method)(request, timeout=timeout_s)

    async def hello(self, node: str = HERE, boot_id: str = "boot") -> node_pb2.HelloReply:
        """Says Hello and, once a boot, begins to watch: as a daemon does before it reserves."""
        request = node_pb2.HelloRequest(node=node, boot_id=boot_id, protocol=2, transport="tcp")
        reply = await self.ask_node("Hello", request)
        if (node, boot_id) not in self.watches:
            self.watches[node, boot_id] = await self.watch(node, boot_id)
        return reply

    async def watch(self, node: str = HERE, boot_id: str = "boot", silence_ms: int = 60_000) -> Any:
        """A Watch that is answered; its daemon hears nothing more of it unless the test says so."""
        call = self.node_stub.Watch()
        await call.write(node_pb2.WatchRequest(node=node, boot_id=boot_id, silence_ms=silence_ms))
        async with asyncio.timeout(WAIT_S):
            assert (await call.read()).silence_ms > 0
        return call

    async def status(self) -> engine_pb2.NodeStatusReply:
        return await self.engine_stub.NodeStatus(engine_pb2.NodeStatusRequest(), timeout=WAIT_S)

    async def until_live(self, condition: Callable[[], object]) -> None:
        """Lets the daemon work until its books say so."""
        await until(condition, f"not in time: {self.node.requests.by_kind()}")

    async def everything_is_home(self) -> None:
        """No request, no slot in use, no room taken, no page in use; and the server still answers."""
        requests, pool = self.node.requests, self.node.services.pool
        await until(lambda: not requests.live() and pool.idle(), f"still live: {requests.live()}, {pool.slot_counts()}")
        status = await self.status()
        assert sum(status.requests.values()) == 0, status.requests
        for slots in status.slots:
            assert (slots.filling, slots.leased, slots.quarantined) == (0, 0, 0), slots
            assert slots.total == slots.free + slots.clean, slots
        admission = self.node.services.room._admission
        assert [(admission.taken_bytes(purpose), admission.waiting(purpose)) for purpose in Purpose] == [(0, 0)] * len(
            Purpose
        )
        for session in self.node.sessions.all():
            for region in session.regions.values():
                await until(lambda region=region: region.users == 0, f"region {region.region_id} is still in use")
                assert int(region.written.sum()) == 0
        assert not self.node.prefills.by_name
        assert not self.node.decode_side._waiting

    async def close(self) -> None:
        for engine in self._engines:
            engine.close()
        for watch in self.watches.values():
            watch.cancel()
        await self.engine_channel.close()
        await self.node_channel.close()


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to connections."""
    for _ in range(1_000):
        port = random.randrange(10_000, 32_000)
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def config_values(home: Path, name: str, port: int, **changed: dict[str, Any]) -> dict[str, Any]:
    """A config file's content; keys of `changed` add to its tables."""
    values: dict[str, Any] = {
        "node": {"name": name},
        "engine_api": {"socket": str(home / f"{name}.sock")},
        "node_api": {"listen": f"127.0.0.1:{port}"},
        "pool": {"bytes": 4 * PIECE_BYTES, "piece_bytes": PIECE_BYTES},
        "storage": [{"name": "root", "kind": "memory"}],
        "transport": {"kind": "tcp", "listen": "127.0.0.1:0"},
        "requests": {"admission_wait": "200ms", "attach_timeout": "500ms"},
        "shutdown": {"drain": "1s"},
    }
    for table, keys in changed.items():
        values[table] = keys if isinstance(keys, list) else values.get(table, {}) | keys
    return values


@asynccontextmanager
async def rpc_kit(home: Path, *, name: str = HERE, port: int = 0, **changed: Any) -> AsyncIterator[Kit]:
    """Starts a daemon, and stops it whatever happens."""
    daemon = Daemon(parse(config_values(home, name, port, **changed), home))
    kit: Kit | None = None
    try:
        await daemon.start()
        kit = Kit(daemon, home, next(started.port for started in daemon._servers if started.port))
        yield kit
    finally:
        if kit is not None:
            await kit.close()
        await daemon.stop()


async def answered(call: Awaitable[Any]) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await call


Case = tuple[str, Callable[[], Any], grpc.StatusCode, str]
"""What is wrong, the call, and the code and reason it must be refused with."""


async def check_refusals(kit: Kit, cases: list[Case]) -> None:
    """Makes each call; all that were not refused as they should be are named. Nothing may stay taken."""
    wrong = []
    for name, begin, code, reason in cases:
        try:
            found = await refused(begin())
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
            continue
        if (found.code, found.reason) != (code, reason):
            wrong.append(f"{name}: {found.code.name} [{found.reason}] {found.message}, not {code.name} [{reason}]")
        if not found.message or len(found.message.encode()) > 512:
            wrong.append(f"{name}: a message of {len(found.message)} characters")
    assert not wrong, "\n".join(wrong)
    await kit.everything_is_home()

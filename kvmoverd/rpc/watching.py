"""Watch: the long call by which two daemons know of each other's death. Words come in beats; silence counts as death."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import grpc.aio

from kvmover_proto import node_pb2, node_pb2_grpc
from kvmoverd.core.errors import BadRequest, KvmoverError, PeerUnreachable
from kvmoverd.rpc.errors import from_call
from kvmoverd.rpc.feeding import fed

BEATS = 4
"""Words in the shorter of both ends' silences."""
SILENCE_MS_MIN, SILENCE_MS_MAX = 100, 600_000
OPEN_S = 5.0

Starves = Callable[[str], bool]
"""Whether KV from here to that node gets too little: it is told with each word."""
Lost = Callable[[str, str, str], None]
"""Told once of (node, boot id, message): nothing of that boot can be relied on any more."""
WatchCall = grpc.aio.StreamStreamCall[node_pb2.WatchRequest, node_pb2.WatchReply]


def checked_silence_s(silence_ms: int) -> float:
    """Raises `BadRequest`."""
    if not SILENCE_MS_MIN <= silence_ms <= SILENCE_MS_MAX:
        raise BadRequest(f"silence_ms is {silence_ms}, must be {SILENCE_MS_MIN} to {SILENCE_MS_MAX}")
    return silence_ms / 1000


class Pulse:
    """The other end's last word, in beats of our own: a pause of this process is not the other's silence.

    >>> pulse = Pulse(own_silence_s=2.0, other_silence_s=1.0)
    >>> pulse.beat_s, [pulse.beat() for _ in range(9)].index(True)
    (0.25, 8)
    """

    def __init__(self, *, own_silence_s: float, other_silence_s: float) -> None:
        self.beat_s = min(own_silence_s, other_silence_s) / BEATS
        self._silent_beats = 0
        self._silent_beats_max = math.ceil(own_silence_s / self.beat_s)

    def heard(self) -> None:
        """The other said something."""
        self._silent_beats = 0

    def beat(self) -> bool:
        """A beat of ours is due; True when the other has been silent for too many."""
        self._silent_beats += 1
        return self._silent_beats > self._silent_beats_max


class Watcher:
    """One node that watches this one: the called end of a Watch."""

    def __init__(self, node: str, boot_id: str, *, own_silence_s: float, other_silence_s: float) -> None:
        self.node = node
        self.boot_id = boot_id
        self.why = f"{node} went away"
        self._own_silence_s = own_silence_s
        self._pulse = Pulse(own_silence_s=own_silence_s, other_silence_s=other_silence_s)
        self._ended = asyncio.Event()

    def end(self, why: str) -> None:
        """The first reason counts."""
        if not self._ended.is_set():
            self.why = why
            self._ended.set()

    async def listen(self, requests: AsyncIterator[node_pb2.WatchRequest]) -> None:
        """Until the other ends the call."""
        try:
            async for _ in requests:
                self._pulse.heard()
        finally:
            self.end(f"{self.node} ended its watch")

    async def beat(self) -> bool:
        """Waits for the next beat; False when the watch is over, also because the other is silent."""
        try:
            async with asyncio.timeout(self._pulse.beat_s):
                await self._ended.wait()
        except TimeoutError:
            if self._pulse.beat():
                self.end(f"{self.node} was silent for {self._own_silence_s:g} s")
        return not self._ended.is_set()


class Watchers:
    """The nodes that watch this one, one boot each: as many as there are peers at most."""

    def __init__(self, *, silence_s: float, on_lost: Lost, starves: Starves) -> None:
        self._silence_s = silence_s
        self._on_lost = on_lost
        self._starves = starves
        self._by_node: dict[str, Watcher] = {}
        self._stopping = False

    def __len__(self) -> int:
        return len(self._by_node)

    def boot_of(self, node: str) -> str | None:
        """Boot id of the node that watches under this name."""
        watcher = self._by_node.get(node)
        return watcher.boot_id if watcher is not None else None

    async def serve(
        self, first: node_pb2.WatchRequest, requests: AsyncIterator[node_pb2.WatchRequest]
    ) -> AsyncGenerator[node_pb2.WatchReply, None]:
        """Answers a Watch that was opened with `first`, until it ends. Raises `BadRequest`."""
        silence_s = checked_silence_s(first.silence_ms)
        watcher = Watcher(first.node, first.boot_id, own_silence_s=self._silence_s, other_silence_s=silence_s)
        self._open(watcher)
        try:
            async with fed(watcher.listen(requests)):
                yield node_pb2.WatchReply(
                    silence_ms=int(self._silence_s * 1000), lane_starved=self._starves(watcher.node)
                )
                while await watcher.beat():
                    yield node_pb2.WatchReply(lane_starved=self._starves(watcher.node))
        finally:
            self._close(watcher)

    def drop(self, node: str, boot_id: str, why: str) -> None:
        """This node has given that one up: it learns so by the end of its watch; `on_lost` is not told."""
        watcher = self._by_node.get(node)
        if watcher is not None and watcher.boot_id == boot_id:
            del self._by_node[node]
            watcher.end(why)

    def stop(self) -> None:
        """This node goes: every watch ends."""
        self._stopping = True
        for watcher in list(self._by_node.values()):
            watcher.end("this node stops")

    def _open(self, watcher: Watcher) -> None:
        """What a node held here before its new watch is void: it has restarted, or has given this node up."""
        if self._stopping:
            raise PeerUnreachable("this node stops")
        before = self._by_node.get(watcher.node)
        if before is not None:
            restarted = before.boot_id != watcher.boot_id
            before.end(f"{watcher.node} restarted" if restarted else f"{watcher.node} watches anew")
            self._close(before)
        self._by_node[watcher.node] = watcher

    def _close(self, watcher: Watcher) -> None:
        if self._by_node.get(watcher.node) is watcher:
            del self._by_node[watcher.node]
            self._on_lost(watcher.node, watcher.boot_id, watcher.why)


class PeerWatch:
    """This node watches another: the calling end of a Watch."""

    def __init__(self, node: str, boot_id: str, *, silence_s: float, on_end: Callable[[str], None]) -> None:
        """Of one boot of that node. `on_end` is told why it ended, at most once, unless it is closed before."""
        self.boot_id = boot_id
        self.lane_starved = False
        """What the other said last: KV from it to this node gets too little."""
        self._node = node
        self._silence_s = silence_s
        self._on_end = on_end
        self._why = ""
        self._running: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        return self._running is None or self._running.done()

    async def open(self, stub: node_pb2_grpc.NodeAsyncStub, own_node: str, own_boot_id: str) -> None:
        """Returns when the other watches too. Raises `KvmoverError`."""
        first = node_pb2.WatchRequest(node=own_node, boot_id=own_boot_id, silence_ms=int(self._silence_s * 1000))
        self._running = asyncio.get_running_loop().create_task(self._run(stub.Watch(), first))
        try:
            async with asyncio.timeout(OPEN_S):
                await self._opened
        except TimeoutError:
            self.close()
            raise PeerUnreachable(f"{self._node} did not answer a watch within {OPEN_S:g} s") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends it, and tells nobody here."""
        self._on_end = _tell_nobody
        if self._running is not None:
            self._running.cancel()

    async def closed(self) -> None:
        """Returns when nothing of it is left; after `close`, at once."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def _run(self, call: WatchCall, first: node_pb2.WatchRequest) -> None:
        error: KvmoverError = PeerUnreachable(f"{self._node} ended its watch")
        try:
            await call.write(first)
            reply = await call.read()
            if isinstance(reply, node_pb2.WatchReply):
                self.lane_starved = reply.lane_starved
                await self._listen(call, reply.silence_ms / 1000)
        except grpc.aio.AioRpcError as broken:
            error = from_call(broken)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = PeerUnreachable(self._why or f"{self._node} cancelled its watch")
        finally:
            call.cancel()
            self._over(error)

    async def _listen(self, call: WatchCall, other_silence_s: float) -> None:
        pulse = Pulse(own_silence_s=self._silence_s, other_silence_s=max(other_silence_s, SILENCE_MS_MIN / 1000))
        if not self._opened.done():
            self._opened.set_result(None)
        async with fed(self._beat(call, pulse)):
            while isinstance(reply := await call.read(), node_pb2.WatchReply):
                pulse.heard()
                self.lane_starved = reply.lane_starved

    async def _beat(self, call: WatchCall, pulse: Pulse) -> None:
        while True:
            await asyncio.sleep(pulse.beat_s)
            if pulse.beat():
                self._why = f"{self._node} was silent for {self._silence_s:g} s"
                call.cancel()
                return
            try:
                await call.write(node_pb2.WatchRequest())
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                return  # whoever reads learns why

    def _over(self, error: KvmoverError) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()
            return
        self._on_end(str(error))


def _tell_nobody(why: str) -> None:
    """For a watch that was closed here."""

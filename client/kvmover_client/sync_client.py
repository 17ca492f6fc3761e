"""The blocking client: the same methods as `AsyncClient`, from any thread, with a loop of its own in the background."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self, TypeVar

from kvmover_client.async_client import CONNECT_S, AsyncClient
from kvmover_client.blocking import LoopThread, Twin, blocking, opening
from kvmover_client.call import Call, LayerCall
from kvmover_client.calls import AssembleCall, DeliverCall, FetchCall, PushCall, StoreCall, StreamCall
from kvmover_client.errors import DaemonGone
from kvmover_client.leader import Leader
from kvmover_client.scheduling import HeldAssignment, Role, Ticket
from kvmover_client.submitting import Submitted

BELL_S = 1.0
"""A thread that waits longer than this asks the loop's thread, which also knows when this client is closed."""

T = TypeVar("T")
SomeCall_co = TypeVar("SomeCall_co", bound=Call[Any], covariant=True)
SomeLayerCall_co = TypeVar("SomeLayerCall_co", bound=LayerCall[Any], covariant=True)


async def _cancel(call: Call[Any]) -> None:
    """As a coroutine, because calls are touched on their loop only."""
    call.cancel()


class BlockingCall(Twin[SomeCall_co]):
    """What all blocking calls have in common; see `Call`. Waits may run in several threads at once."""

    end = blocking(Call[Any].end)
    quiet = blocking(Call[Any].quiet)

    def cancel(self) -> None:
        """Asks the daemon to end this attempt's calls on this node; the last word still comes: `end()`."""
        self._thread.run(_cancel(self._inner))


class BlockingLayerCall(BlockingCall[SomeLayerCall_co]):
    """A call that puts layers into pages, in order."""

    _wait_layer = blocking(LayerCall[Any].wait_layer)

    @property
    def ready_layers(self) -> int:
        """Layers [0, n) are in the pages, checked."""
        return self._inner.ready_layers

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> None:
        """Returns when the layer is in the pages, checked."""
        # Mostly it is there already, or soon: the loop's thread then rings a bell, which is cheaper than a task of its own.
        # What else may come, an end, a failure or the deadline, is told by the loop's thread.
        if self._inner.ready_layers > layer:
            return
        began_s = time.monotonic()
        self._listen(layer, BELL_S if timeout_s is None else min(BELL_S, timeout_s))
        if self._inner.ready_layers <= layer:
            left_s = None if timeout_s is None else max(0.0, began_s + timeout_s - time.monotonic())
            self._wait_layer(layer, left_s)

    def _listen(self, layer: int, timeout_s: float) -> None:
        """Returns when the layer is there, or the call is over, or in time."""
        call, until_s = self._inner, time.monotonic() + timeout_s
        with call.a_bell() as bell:
            while call.ready_layers <= layer and not call.is_over:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not bell.acquire(timeout=left_s):
                    return


class BlockingFetchCall(BlockingCall[FetchCall]):
    """See `FetchCall`."""

    result = blocking(FetchCall.result)

    @property
    def done_blocks(self) -> int:
        """Blocks whose outcome is known so far."""
        return self._inner.done_blocks


class BlockingStreamCall(BlockingLayerCall[StreamCall]):
    """See `StreamCall`."""

    prefix = blocking(StreamCall.prefix)
    computed = blocking(StreamCall.computed)


class BlockingPushCall(BlockingCall[PushCall]):
    """See `PushCall`."""

    computed = blocking(PushCall.computed)
    wait_pushed = blocking(PushCall.wait_pushed)

    @property
    def pushed_layers(self) -> int:
        """Layers [0, n) have been applied in the decode node's buffer."""
        return self._inner.pushed_layers


class BlockingAssembleCall(BlockingCall[AssembleCall]):
    """See `AssembleCall`."""

    attached = blocking(AssembleCall.attached)
    whole = blocking(AssembleCall.whole)
    stored = blocking(AssembleCall.stored)


class BlockingDeliverCall(BlockingLayerCall[DeliverCall]):
    """See `DeliverCall`."""


class BlockingStoreCall(BlockingCall[StoreCall]):
    """See `StoreCall`."""

    accepted = blocking(StoreCall.accepted)
    result = blocking(StoreCall.result)


class BlockingSubmitted(Twin[Submitted]):
    """See `Submitted`. Waits may run in several threads at once."""

    assigned = blocking(Submitted.assigned)
    done = blocking(Submitted.done)
    change = blocking(Submitted.change)
    withdraw = blocking(Submitted.withdraw)
    explain = blocking(Submitted.explain)

    @property
    def request_id(self) -> str:
        return self._inner.request_id

    @property
    def ticket(self) -> Ticket:
        """What was last heard. Nothing new is heard while nobody waits."""
        return self._inner.ticket


class Client(Twin[AsyncClient]):
    """One session with the daemon of this node, for one engine; see `AsyncClient`. Safe to use from several threads."""

    @classmethod
    def connect(
        cls,
        endpoint: str = "",
        *,
        name: str = "engine",
        timeout_s: float = CONNECT_S,
        progress_page: bool = True,
    ) -> Self:
        """As `AsyncClient.connect`; starts the background thread that `close` ends."""
        thread = LoopThread(f"kvmover-{name}")
        try:
            connecting = AsyncClient.connect(endpoint, name=name, timeout_s=timeout_s, progress_page=progress_page)
            return cls(thread.run(connecting), thread)
        except BaseException:
            thread.stop()
            raise

    def close(self) -> None:
        """Ends the session and the thread; calls that wait in other threads fail with `DaemonGone`."""
        try:
            # Another thread may have closed it first.
            with suppress(DaemonGone):
                self._close()
        finally:
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def session_id(self) -> str:
        """Name of the session in the daemon's log."""
        return self._inner.session_id

    @property
    def boot_id(self) -> str:
        """Changes with each start of the daemon."""
        return self._inner.boot_id

    @property
    def is_gone(self) -> bool:
        """True once the session is over."""
        return self._inner.is_gone

    _close = blocking(AsyncClient.close)
    reconnect = blocking(AsyncClient.reconnect)
    register_model = blocking(AsyncClient.register_model)
    bump_epoch = blocking(AsyncClient.bump_epoch)
    purge_namespace = blocking(AsyncClient.purge_namespace)
    purge_tenant = blocking(AsyncClient.purge_tenant)
    register_region = blocking(AsyncClient.register_region)
    register_cuda_region = blocking(AsyncClient.register_cuda_region)
    unregister_region = blocking(AsyncClient.unregister_region)
    lookup = blocking(AsyncClient.lookup)
    prefetch = blocking(AsyncClient.prefetch)
    pin = blocking(AsyncClient.pin)
    renew = blocking(AsyncClient.renew)
    release = blocking(AsyncClient.release)
    cancel = blocking(AsyncClient.cancel)
    node_status = blocking(AsyncClient.node_status)
    drain = blocking(AsyncClient.drain)
    fetch_blocks = opening(AsyncClient.fetch_blocks, BlockingFetchCall)
    stream_layers = opening(AsyncClient.stream_layers, BlockingStreamCall)
    push_layers = opening(AsyncClient.push_layers, BlockingPushCall)
    assemble_blocks = opening(AsyncClient.assemble_blocks, BlockingAssembleCall)
    deliver = opening(AsyncClient.deliver, BlockingDeliverCall)
    store_blocks = opening(AsyncClient.store_blocks, BlockingStoreCall)
    store_chains = opening(AsyncClient.store_chains, BlockingStoreCall)
    submit = opening(AsyncClient.submit, BlockingSubmitted)
    pull_work = blocking(AsyncClient.pull_work)
    choose_path = blocking(AsyncClient.choose_path)


class BlockingLeader(Twin[Leader]):
    """See `Leader`. One thread pulls; others may say meanwhile what their engines have done."""

    def __init__(self, client: Client, group: str, model: str, role: Role, *, boot_id: str = "") -> None:
        """As `Leader`."""
        super().__init__(Leader(client._inner, group, model, role, boot_id=boot_id), client._thread)

    pull = blocking(Leader.pull)

    @property
    def pull_again_s(self) -> float:
        """When the next pull is wanted; after one that failed, when it is worth while."""
        return self._inner.pull_again_s

    @property
    def held(self) -> tuple[HeldAssignment, ...]:
        """What the group goes on with."""
        return self._on_loop(lambda: self._inner.held)

    def prefilled(self, request_id: str, attempt: int) -> bool:
        """See `Leader.prefilled`."""
        return self._on_loop(lambda: self._inner.prefilled(request_id, attempt))

    def whole(self, request_id: str, attempt: int) -> bool:
        """See `Leader.whole`."""
        return self._on_loop(lambda: self._inner.whole(request_id, attempt))

    def finished(self, request_id: str, attempt: int) -> bool:
        """See `Leader.finished`."""
        return self._on_loop(lambda: self._inner.finished(request_id, attempt))

    def failed(self, request_id: str, attempt: int) -> bool:
        """See `Leader.failed`."""
        return self._on_loop(lambda: self._inner.failed(request_id, attempt))

    def _on_loop(self, work: Callable[[], T]) -> T:
        """A leader's books are touched on its loop only."""

        async def run() -> T:
            return work()

        return self._thread.run(run())

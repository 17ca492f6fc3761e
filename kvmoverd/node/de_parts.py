"""Parts of DE buffers: what this node reads for a prefill node, into the buffer and from there to that node's pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvmoverd.core.errors import KvmoverError, PoolExhausted, QueueFull
from kvmoverd.core.status import BlockOutcome, End, Reason
from kvmoverd.node.assembling import AssemblyDriver
from kvmoverd.node.block_set import BlockSet
from kvmoverd.node.de_buffer import OwnRead, Rest
from kvmoverd.node.driver import Call
from kvmoverd.node.parts import PartBook
from kvmoverd.node.peer import PartListener, PartOrder
from kvmoverd.node.reading import Destination, PartDriver
from kvmoverd.node.reasons import reason_of
from kvmoverd.node.requests import Requests
from kvmoverd.node.room import RETRY_S
from kvmoverd.node.services import Services
from kvmoverd.ports.transport import Sender


class DeParts:
    """Opens parts; `book` knows them by their owner's numbers until they are gone."""

    def __init__(self, services: Services, requests: Requests, book: PartBook) -> None:
        self._services = services
        self._requests = requests
        self._book = book

    def open(
        self,
        assembly: AssemblyDriver,
        order: PartOrder,
        owner: Sender,
        destination: Destination,
        listener: PartListener,
    ) -> PartDriver:
        """A part of a buffer; it does nothing before `start`, and ends with the buffer.

        Before the prefix is set it may be any hit blocks that nobody reads here yet; afterwards it takes over what a third node
        was to send: what has come from there whole is sent on from the buffer, all else is read anew. Raises
        `UnknownRequest`, `BadRequest`, `QueueFull`.
        """
        self._book.check_new(owner, order.part)
        part = _DePart(assembly, listener)
        blocks, helped = None, None
        if assembly.machine.prefix_blocks is None:
            part.read = assembly.read_of(order.blocks)
            blocks = part.read.found
        elif assembly.has_helped(number := assembly.helped_part(order.blocks)):
            blocks = assembly.buffer.in_place(order.blocks)
        else:
            helped = number
        driver = self._driver(assembly, order, destination, part, blocks)
        part.driver = driver
        if part.read is not None:
            part.read.part = driver
        if helped is not None:
            driver.wait_for_blocks()
            assembly.fence_helped(helped, lambda: part.take_over(order))
        self._book.add(owner, order.part, driver)
        self._requests.add(driver)
        assembly.has_part(driver)
        return driver

    def _driver(
        self,
        assembly: AssemblyDriver,
        order: PartOrder,
        destination: Destination,
        part: _DePart,
        blocks: BlockSet | None,
    ) -> PartDriver:
        keys = assembly.reservation.block_keys
        return PartDriver(
            self._services,
            Call(assembly.call.request_id, assembly.call.attempt, "", assembly.call.timeout_s),
            namespace=assembly.namespace,
            keys=[keys[block] for block in order.blocks.indexes().tolist()],
            credit_layers=order.credit_layers,
            destination=destination,
            listener=PartListener(
                part.on_prefix, part.on_end, part.listener.on_progress, part.on_gave_up, part.on_gave_rest
            ),
            blocks=blocks,
            first_block=order.blocks.first,
            first_layer=order.first_layer,
            holds=order.holds,
        )


class _DePart:
    """One part, between its driver and its owner: the buffer hears first. While blocks that were given up have no slots yet the
    owner is told nothing: another reader may begin when he hears of it."""

    def __init__(self, assembly: AssemblyDriver, listener: PartListener) -> None:
        self.assembly = assembly
        self.listener = listener
        self.driver: PartDriver | None = None
        self.read: OwnRead | None = None
        self._held: list[Callable[[], None]] | None = None

    def on_prefix(self, prefix_blocks: int, first_lost: BlockOutcome | None) -> None:
        if self.read is not None:
            self.assembly.hits_read(self.read, prefix_blocks)
        self._tell(lambda: self.listener.on_prefix(prefix_blocks, first_lost))

    def on_end(self, end: End) -> None:
        self._tell(lambda: self.listener.on_end(end))
        if end.reason is Reason.PREFIX_CUT and self.read is not None:
            self.assembly.cut(self.read.blocks.at(end.prefix_blocks), end.message)

    def on_gave_up(self, kept_blocks: int) -> None:
        if self.read is None or kept_blocks == self.read.blocks.count:
            self._tell(lambda: self.listener.on_gave_up(kept_blocks))
            return
        self.assembly.give_up(self.read, kept_blocks)
        self._held = []

        def filled() -> None:
            self.assembly.fill()
            self._go_on(lambda: self.listener.on_gave_up(kept_blocks))

        Tries(self.assembly, filled, self._no_slots, over=self._go_on)

    def on_gave_rest(self, kept_blocks: int, first_layer: int) -> None:
        """`first_layer` 0: nothing was given."""
        if first_layer:
            assert self.read is not None, "blocks that are whole in the buffer have no rest"
            self.assembly.gave_rest(self.read, Rest(kept_blocks, first_layer))
        self._tell(lambda: self.listener.on_gave_rest(kept_blocks, first_layer))

    def take_over(self, order: PartOrder) -> None:
        """Nothing of the third node lands any more."""
        driver = self.driver
        assert driver is not None, "a part is taken over before it was opened"

        def taken() -> None:
            self.read = self.assembly.take(order.blocks)
            self.read.part = driver
            driver.take_blocks(self.read.found)

        Tries(self.assembly, taken, driver.refused)

    def _no_slots(self, error: KvmoverError) -> None:
        self.assembly.stop(reason_of(error), f"slots for blocks that were given up: {error}")
        self._go_on()

    def _tell(self, told: Callable[[], None]) -> None:
        if self._held is None:
            told()
        else:
            self._held.append(told)

    def _go_on(self, *first: Callable[[], None]) -> None:
        held, self._held = self._held or [], None
        for told in [*first, *held]:
            told()


class Tries:
    """Takes what a buffer needs, again and again within the admission wait: slots and places may be on their way home.

    `failed` is called when the wait is over, `over` when the buffer goes before that; nothing after either, or after success.
    """

    def __init__(
        self,
        assembly: AssemblyDriver,
        take: Callable[[], None],
        failed: Callable[[KvmoverError], None],
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self._assembly = assembly
        self._take = take
        self._failed = failed
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._until_s = self._loop.time() + assembly.services.limits.admission_wait_s
        self._timer: asyncio.TimerHandle | None = None
        self._try()

    def _try(self) -> None:
        if self._assembly.buffer.released:
            self._over()
            return
        try:
            self._take()
        except (PoolExhausted, QueueFull) as error:
            if self._loop.time() >= self._until_s:
                self._done()
                self._failed(error)
                return
            if self._timer is None:
                self._assembly.on_gone.append(self._gone)
            self._timer = self._loop.call_later(RETRY_S, self._try)
            return
        self._done()

    def _done(self) -> None:
        self._timer = None
        if self._gone in self._assembly.on_gone:
            self._assembly.on_gone.remove(self._gone)

    def _gone(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._over()

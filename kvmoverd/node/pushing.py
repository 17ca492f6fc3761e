"""Push driver: computed layers out of a prefill engine's pages into the DE buffer."""

from __future__ import annotations

from typing import ClassVar

from kvmoverd.core.machines.actions import Action, AnnounceLayers, Finish, SendLayer
from kvmoverd.core.machines.push import PushMachine
from kvmoverd.core.runs import NO_RUNS, Runs
from kvmoverd.core.status import End, Reason
from kvmoverd.node.driver import Driver
from kvmoverd.node.mover import Need
from kvmoverd.node.prefill import PrefillRequest
from kvmoverd.node.sessions import Pages, Region
from kvmoverd.node.slices import region_iovec


class PushDriver(Driver):
    """One PushLayers call. It sends all blocks of a layer but those that the decode node has, reads, or gets from third nodes.

    What the decode node has ceased to read is sent from that layer on, with the others and in their order.
    """

    kind: ClassVar[str] = "push"

    def __init__(self, request: PrefillRequest) -> None:
        super().__init__(request.services, request.plan.call)
        self.request = request
        layers = request.plan.namespace.layout.layer_count
        self._machine = PushMachine(layers=layers, window_layers=request.services.limits.window_layers)
        self._pages: dict[int, tuple[Runs, Pages]] = {}
        """By page set: the blocks of the last layer that was pushed out of it, and their pages."""
        request.join("push")
        request.on_prefix_set.append(self._prefix_set)
        request.on_reserve_failed.append(self.stop)
        request.on_failed.append(self.fail)
        request.on_computed.append(lambda layers: self.run(self._machine.on_computed(layers)))

    @property
    def machine(self) -> PushMachine:
        return self._machine

    def start(self, *, alone: bool) -> None:
        """`alone`: no StreamLayers comes; the request has nothing to load, and the push reserves by itself."""
        if self.request.failed is not None:
            self.stop(*self.request.failed)
        elif self.request.prefix_set:
            self._prefix_set()
        elif alone:
            self.request.on_reserved.append(lambda: self.request.set_prefix(self.request.plan.hit_blocks))
            self.request.reserve()

    def fail(self, end: End) -> None:
        """The other call of the request has failed. Whichever end the engine hears of first says from where it computes anew."""
        self.run(self._machine.on_stop(end.reason, end.message, end.prefix_blocks))

    def uses_region(self, region: Region) -> bool:
        return self.request.plan.region is region

    def gone(self) -> None:
        self.request.pushed_whole = self._machine.window.complete
        self.request.leave("push", self.ended.reason if self.ended else Reason.CANCELLED)

    def do(self, action: Action) -> None:
        match action:
            case SendLayer(layer):
                self._send(layer)
            case Finish(end):
                self.request.finished(end)
                self.outbox.put(action)
            case AnnounceLayers(_, last):
                self.outbox.put(action)
                for told in self.request.on_pushed:
                    told(last + 1)
            case _:
                self.outbox.put(action)

    def _prefix_set(self) -> None:
        self.run(self._machine.on_prefix_set())

    def _send(self, layer: int) -> None:
        plan, reserved, pushed = self.request.plan, self.request.reserved, self.request.pushed_of(layer)
        assert reserved is not None, "a layer is pushed without a ticket"
        if not pushed:
            # The decode node has everything: it waits for no frame, and may be done with the buffer already.
            self.run(self._machine.on_sent(layer, Reason.OK))
            return
        source = region_iovec(plan.region, layer, self._pages_of(layer, pushed), pushed.count, plan.tail_tokens)
        self.services.mover.send(
            reserved.route, reserved.push_sink, layer, pushed.first, source, self._on_sent, need=Need.ASSEMBLY
        )

    def _pages_of(self, layer: int, pushed: Runs) -> Pages:
        page_set = self.request.plan.page_set(layer)
        blocks, pages = self._pages.get(page_set, (NO_RUNS, None))
        if pages is None or blocks != pushed:
            pages = self.request.plan.pages_of(page_set, pushed)
            self._pages[page_set] = pushed, pages
        return pages

    def _on_sent(self, layer: int, reason: Reason, moved_bytes: int, message: str) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_sent(layer, reason, message))

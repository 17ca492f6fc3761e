"""Helper side: this node reads some blocks of a request of two others, and sends their layers to both."""

from __future__ import annotations

from kvmoverd.core.errors import BadPlan, BadRequest
from kvmoverd.core.store.places import known_places
from kvmoverd.node.driver import Call
from kvmoverd.node.parts import PartBook
from kvmoverd.node.peer import Help, PartListener, PartOrder
from kvmoverd.node.reading import Destination, Helping, PartDriver
from kvmoverd.node.requests import Requests
from kvmoverd.node.services import Services
from kvmoverd.ports.transport import Route, Sender


class HelperSide:
    """Helps with what is left over: room of its own in the pool, for which nobody waits long, and reads that go behind this
    node's own. `requests` bounds how many parts one owner has here, and fences lower attempts.
    """

    def __init__(self, services: Services, requests: Requests, parts: PartBook) -> None:
        self._services = services
        self._requests = requests
        self._parts = parts

    @property
    def helps(self) -> bool:
        """Are parts of others taken on?"""
        return self._services.split.helps and not self._requests.draining

    def open(
        self,
        order: PartOrder,
        *,
        owner: Sender,
        to_owner: Route | None,
        to_decode: Route | None,
        listener: PartListener,
    ) -> PartDriver:
        """A part that its owner, the prefill node, may drive; it does nothing before `start`.

        Routes are None within this process; `to_decode` counts where the order names a decode node. Raises `BadPlan` on a
        node that helps nobody, `BadRequest`, `Draining`, `QueueFull`, `StaleAttempt`, `RequestTaken`.
        """
        wanted = _checked(order)
        if not self._services.split.helps:
            raise BadPlan(f"{self._services.node} reads for no other node: split.helps")
        self._parts.check_new(owner, order.part)
        kind = f"help {order.part}"
        with self._requests.entering(kind, wanted.request_id, wanted.attempt, owner=owner[0]):
            driver = PartDriver(
                self._services,
                Call(wanted.request_id, wanted.attempt, "", order.timeout_s),
                namespace=wanted.namespace,
                keys=wanted.keys,
                credit_layers=order.credit_layers,
                destination=Destination(to_owner, order.sink_id),
                listener=listener,
                first_block=order.blocks.first,
                first_layer=order.first_layer,
                holds=order.holds,
                helping=_helping(wanted, to_decode),
            )
            if order.rest:
                driver.read_rest()
        self._parts.add(owner, order.part, driver)
        self._requests.add(driver, owner=owner[0])
        return driver


def _checked(order: PartOrder) -> Help:
    """Raises `BadRequest`."""
    wanted = order.help
    if wanted is None or not wanted.keys or len(wanted.keys) != order.blocks.count:
        count = 0 if wanted is None else len(wanted.keys)
        raise BadRequest(f"{count} keys are given for a part of {order.blocks.count} blocks")
    layers = wanted.namespace.layout.layer_count
    if order.rest and not 0 < order.first_layer < layers:
        raise BadRequest(f"the rest of a part begins at layer {order.first_layer}, must be 1 to {layers - 1}")
    return wanted


def _helping(wanted: Help, to_decode: Route | None) -> Helping:
    to_buffer = Destination(to_decode, 0) if wanted.decode_node else None
    return Helping(known_places(wanted.keys, wanted.places), to_buffer)

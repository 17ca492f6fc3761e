"""Part book: the parts that this node reads for requests of other nodes, and for its own prefill engines, by their numbers."""

from __future__ import annotations

from kvmoverd.core.errors import BadRequest
from kvmoverd.core.status import Reason
from kvmoverd.node.reading import PartDriver
from kvmoverd.ports.transport import Sender


class PartBook:
    """A part is known by its owner, a node and its boot id, and the number that the owner gave it. Gone is forgotten."""

    def __init__(self) -> None:
        self._parts: dict[tuple[Sender, int], PartDriver] = {}

    def check_new(self, owner: Sender, part: int) -> None:
        """Raises `BadRequest` when a part of this number is open."""
        if (owner, part) in self._parts:
            raise BadRequest(f"part {part} of {owner[0]} is open already", part=part)

    def add(self, owner: Sender, part: int, driver: PartDriver) -> None:
        """Keeps it until it is gone. Raises as `check_new`."""
        self.check_new(owner, part)
        self._parts[owner, part] = driver
        driver.on_gone.append(lambda: self._forget(owner, part))

    def find(self, owner: Sender, part: int) -> PartDriver | None:
        return self._parts.get((owner, part))

    def stop(self, owner: Sender, part: int) -> PartDriver | None:
        """Stops the part, if there is one: it is gone when it sends nothing any more."""
        driver = self.find(owner, part)
        if driver is not None:
            driver.stop()
        return driver

    def peer_lost(self, node: str, boot_id: str, message: str) -> None:
        """Nobody waits for the parts of this boot any more, and nothing more reaches it."""
        for (owner, _), driver in list(self._parts.items()):
            if owner == (node, boot_id) or driver.goes_to(node, boot_id):
                driver.stop(Reason.PEER_LOST, f"{node}: {message}")

    def __len__(self) -> int:
        return len(self._parts)

    def _forget(self, owner: Sender, part: int) -> None:
        del self._parts[owner, part]

"""What the links must know of memory: which of it the CNICs may touch, by which keys, and which CNIC is nearest to it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.transport.verbs.fabric import FabricError
from kvmoverd.ports.transport import IoVec

Keys = npt.NDArray[np.uint32]
"""Shape (n, 2): local and remote key of each slice."""


class NotRegistered(FabricError):
    """Bytes that the CNIC was never given; the message names address and size."""


class Book(Protocol):
    """The registrations of all CNICs. Called from the transport's own thread while others add to it and remove from it.

    Who removes memory has seen to it before that no send and no sink names it any more.
    """

    def keyed(self, cnic: int, slices: IoVec) -> tuple[IoVec, Keys]:
        """The same bytes in the same order, cut where a registration ends, and the keys of each piece on that CNIC.

        Slices without a byte may be left out. Raises `NotRegistered`.
        """

    def preferred(self, slices: IoVec) -> int:
        """Which CNIC is nearest to this memory, by its first slice; -1: none is nearer than the others."""

    def close(self) -> bool:
        """Ends all registrations: no queue pair is left that could use them. False: the devices keep some."""

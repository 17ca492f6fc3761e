"""The RAM index as the storage port sees it: by namespace and keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvmoverd.core.manifest import Namespace
from kvmoverd.core.store.places import Place

Ids: TypeAlias = npt.NDArray[np.uint32]


class TouchCounts(Protocol):
    """What the index tells of use; arrays of one length, which are handed over."""

    def touch(self, segment_ids: Ids, record_indexes: Ids) -> None: ...

    def pin(self, segment_ids: Ids, record_indexes: Ids, for_s: float) -> None: ...

    def forget(self, segment_id: int) -> None: ...


class PortIndex(ABC):
    """What `BlockIndex` asks for, on a look-up by bytes."""

    complete = True

    def __init__(self, touches: TouchCounts) -> None:
        self._touches = touches

    @abstractmethod
    def locate(self, fingerprint16: bytes, keys: bytes) -> tuple[Ids, Ids, npt.NDArray[np.bool_]]:
        """Segment numbers, records, which were found."""

    @abstractmethod
    def places_of(self, segment_ids: Ids, record_indexes: Ids) -> list[Place]:
        """Places as others know them."""

    def known(self, namespace: Namespace, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        return self.locate(namespace.fingerprint[:16], b"".join(keys))[2]

    def places(self, namespace: Namespace, keys: Sequence[bytes]) -> list[Place | None]:
        ids, records, found = self.locate(namespace.fingerprint[:16], b"".join(keys))
        places = iter(self.places_of(ids[found], records[found]))
        return [next(places) if there else None for there in found.tolist()]

    def touch(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        ids, records, found = self.locate(namespace.fingerprint[:16], b"".join(keys))
        self._touches.touch(ids[found], records[found])

    def pin(self, namespace: Namespace, keys: Sequence[bytes], for_s: float) -> int:
        ids, records, found = self.locate(namespace.fingerprint[:16], b"".join(keys))
        self._touches.pin(ids[found], records[found], for_s)
        return int(np.count_nonzero(found))

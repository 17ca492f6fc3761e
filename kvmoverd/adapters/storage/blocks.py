"""What lies beneath the storages over files: where the records of one root are, in one of the two layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvmoverd.adapters.storage.block_io import BlockIo
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.store.places import Place
from kvmoverd.ports.storage import BlockIndex, BlockProbe, BlockRead, BlockWrite, StorageDone

End = Callable[[StorageDone], None]

LOOKS = 2
"""Damage that is gone at the second look came from the way, not from the disk."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A record in an open file: byte `offset_bytes` of `fd` is its first.

    `whole` false: the file is not what it should be; `Blocks.read` knows what to do. `lasting`: the descriptor stays open
    after `let_go`, until `Blocks.on_close` names it. `generation`: what the record's header must say, 0: anything.
    """

    fd: int
    offset_bytes: int
    whole: bool
    lasting: bool = False
    place: Place | None = None
    generation: int = 0


class Blocks(Protocol):
    """Records of one root. Calls block, and are for the threads of a storage, many at once; some, and `index`, for the loop."""

    on_close: Callable[[int], None]
    """Called with each lasting descriptor just before it is closed."""

    @property
    def io(self) -> BlockIo: ...

    @property
    def index(self) -> BlockIndex: ...

    def open(self, op: BlockRead) -> Opened:
        """Where the record is. Raises `OSError`; ENOENT and ESTALE are a miss."""

    def let_go(self, opened: Opened) -> None:
        """Ends what `open` began; once for each."""

    def check(self, op: BlockRead, opened: Opened | None) -> None:
        """Checks the layers of the range in the slot, and that the header is that of this block. Raises `RecordMismatch`.

        `opened`: where they were read, which may be let go by now; None where nothing had to be.
        """

    def failed(self, op: BlockRead, place: Place | None, error: OSError) -> None:
        """Others read what `open` gave, and the device failed: it may be remembered, so that nobody tries again at once."""

    def read(self, op: BlockRead, *, looks: int) -> StorageDone:
        """Reads and checks, start to end, looking so often; what is damaged at every look is not found again."""

    def write(self, op: BlockWrite, end: End) -> None:
        """Has it written; `end` is called once, perhaps by another thread and later. An exception instead is fine, too."""

    def probe(self, op: BlockProbe) -> StorageDone:
        """Leading keys that are stored."""

    def open_namespace(self, namespace: Namespace) -> None:
        """As in the port."""

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        """As in the port."""

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        """As in the port."""

    def heard(self, author: str, log: int) -> None:
        """As in the port; for the loop."""

    def signature(self) -> tuple[str, int]:
        """As in the port; for the loop."""

    def trial_path(self) -> str:
        """A name for a file that a trial makes and unlinks."""

    def notes(self) -> list[str]:
        """What a person should know now, beside the note of `io`; each is a short phrase. For the loop."""

    def details(self) -> Mapping[str, int | str]:
        """What there is to tell by name, as `StorageFacts` has it. For the loop."""

    def close(self, timeout_s: float) -> bool:
        """Ends its own threads; True when none of them touches a slot any more. It may be called again."""

"""Sessions and regions: what an engine has registered, and who still uses it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvmoverd.core.errors import BadPages, BadRegion, KvmoverError, PagesBusy, QueueFull, UnknownRegion, UnknownSession
from kvmoverd.core.geometry import RegionGeometry
from kvmoverd.core.manifest import Namespace
from kvmoverd.node.progress import ProgressBook
from kvmoverd.ports.memory import Memory

TOKEN_BYTES = 32
FDS_PENDING_MAX = 64
REGIONS_MAX = 256
MAPPED_BYTES_MAX = 4 << 40
"""Of one session: more than the memory of a node, and a thirtieth of a process's address space, which is 128 TiB. A sparse
file costs its owner nothing, and its mapping costs addresses here."""
MAPPED_TOTAL_BYTES_MAX = 64 << 40
"""Of all sessions: half of the address space; the daemon needs the rest for itself."""

Pages = npt.NDArray[np.uint32]


@dataclass(eq=False)
class Region:
    """Engine memory with its geometry. Unmapped when it is closing and nobody uses it."""

    region_id: int
    session_id: str
    memory: Memory
    geometry: RegionGeometry
    namespace: Namespace
    users: int = 0
    closing: bool = False
    unmapped: bool = False
    on_quiet: list[Callable[[], None]] = field(default_factory=list)
    written: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.written = np.zeros(self.geometry.pages, dtype=np.bool_)

    def check(self, pages: Pages, blocks: int) -> None:
        """Raises `BadPages` unless these are exactly the pages of `blocks` blocks."""
        self.geometry.check_pages(pages, blocks * self.geometry.pages_per_block)

    def use(self, written_pages: Pages | None) -> None:
        """Takes a use; `written_pages` will be written by this daemon. Raises `PagesBusy`, `UnknownRegion` when closing."""
        if self.closing:
            raise UnknownRegion(f"region {self.region_id} is being unregistered", region_id=self.region_id)
        if written_pages is not None:
            busy = int(self.written[written_pages].sum())
            if busy:
                raise PagesBusy(f"{busy} of {len(written_pages)} pages are being written by another request", busy=busy)
            self.written[written_pages] = True
        self.users += 1

    def let_go(self, written_pages: Pages | None) -> None:
        """Ends a use, once no device touches the pages."""
        assert self.users > 0, f"region {self.region_id} is let go more often than used"
        if written_pages is not None:
            self.written[written_pages] = False
        self.users -= 1
        self._unmap_if_idle()

    def pages_quiet(self, written_pages: Pages) -> None:
        """No device touches these pages any more, others may write them; the use goes on, the region stays mapped."""
        self.written[written_pages] = False

    def close(self, on_quiet: Callable[[], None]) -> None:
        """No new use from here on; `on_quiet` when it is unmapped."""
        self.closing = True
        self.on_quiet.append(on_quiet)
        self._unmap_if_idle()

    def _unmap_if_idle(self) -> None:
        if self.closing and self.users == 0 and self.on_quiet:
            waiting, self.on_quiet = self.on_quiet, []
            if not self.unmapped:
                self.unmapped = True
                self.memory.close()
            for on_quiet in waiting:
                on_quiet()


@dataclass(eq=False)
class Session:
    """One engine, alive as long as its companion socket and its process."""

    session_id: str
    client: str
    pid: int
    regions: dict[int, Region] = field(default_factory=dict)
    mappings: dict[int, Memory] = field(default_factory=dict)
    progress: ProgressBook | None = None
    alive: bool = True

    @property
    def mapped_bytes(self) -> int:
        """Address space that its regions take, registered or not."""
        regions = (region.memory for region in self.regions.values())
        return sum(memory.size_bytes for memory in (*self.mappings.values(), *regions))

    def mapping(self, fd_ticket: int) -> Memory:
        """The memory of a descriptor that was passed and not registered yet. Raises `UnknownRegion`."""
        memory = self.mappings.get(fd_ticket)
        if memory is None:
            raise UnknownRegion(f"fd_ticket {fd_ticket} is none of this session's", fd_ticket=fd_ticket)
        return memory

    def region(self, region_id: int) -> Region:
        region = self.regions.get(region_id)
        if region is None:
            raise UnknownRegion(
                f"region {region_id} is not one of this session's {len(self.regions)}", region_id=region_id
            )
        return region


class Sessions:
    """Sessions by token. Ids and tokens are never used twice."""

    def __init__(self, *, sessions_max: int) -> None:
        self.sessions_max = sessions_max
        self._by_token: dict[bytes, Session] = {}
        self._by_id: dict[str, bytes] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._by_token)

    def all(self) -> list[Session]:
        return list(self._by_token.values())

    def open(self, client: str, pid: int) -> tuple[Session, bytes]:
        if len(self._by_token) >= self.sessions_max:
            raise QueueFull(f"{len(self._by_token)} sessions are open, at most {self.sessions_max} may be")
        session = Session(f"s{self._next}", client, pid)
        token = secrets.token_bytes(TOKEN_BYTES)
        self._next += 1
        self._by_token[token] = session
        self._by_id[session.session_id] = token
        return session, token

    def by_token(self, token: bytes) -> Session:
        session = self._by_token.get(token)
        if session is None:
            raise UnknownSession("no live session has this token")
        return session

    def by_id(self, session_id: str) -> Session | None:
        token = self._by_id.get(session_id)
        return None if token is None else self._by_token[token]

    def keep(self, session: Session, fd_ticket: int, memory: Memory) -> None:
        """Keeps a mapped region for its registration. Raises `BadRegion`, `QueueFull` for too many bytes: it is unmapped."""
        size_bytes, mapped_bytes = memory.size_bytes, session.mapped_bytes
        total_bytes = sum(known.mapped_bytes for known in self._by_token.values())
        text = f"a region of {size_bytes} bytes is refused: "
        try:
            if mapped_bytes + size_bytes > MAPPED_BYTES_MAX:
                raise BadRegion(f"{text}its session has {mapped_bytes} mapped, at most {MAPPED_BYTES_MAX} may be")
            if total_bytes + size_bytes > MAPPED_TOTAL_BYTES_MAX:
                raise QueueFull(
                    f"{text}all sessions have {total_bytes} mapped, at most {MAPPED_TOTAL_BYTES_MAX} may be"
                )
        except KvmoverError:
            memory.close()
            raise
        session.mappings[fd_ticket] = memory

    def end(self, session_id: str) -> Session | None:
        """Forgets the token and closes the pages; the caller cancels what the session still runs."""
        token = self._by_id.pop(session_id, None)
        if token is None:
            return None
        session = self._by_token.pop(token)
        session.alive = False
        if session.progress is not None:
            session.progress.close()
            session.progress = None
        return session


def as_pages(pages: list[int]) -> Pages:
    """Page numbers as an array. Raises `BadPages` for numbers beyond 32 bits."""
    try:
        return np.asarray(pages, dtype=np.uint32)
    except OverflowError as error:
        raise BadPages(f"a page number is out of range: {error}") from error

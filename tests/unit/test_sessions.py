"""Sessions and what they may have mapped: sparse files cost an engine nothing, and this daemon its addresses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from rpc_kit import rpc_kit

from kvmover_client import BadRegion as ClientBadRegion
from kvmoverd.core.errors import BadRegion, QueueFull
from kvmoverd.node import sessions
from kvmoverd.node.sessions import MAPPED_BYTES_MAX, MAPPED_TOTAL_BYTES_MAX, Session, Sessions

ADDRESS_SPACE_BYTES = 128 << 40


@dataclass
class Sparse:
    """A mapping by name only."""

    size_bytes: int
    address: int = 0
    page_kind: str = "4 KiB"
    closed: bool = False

    def close(self) -> None:
        self.closed = True


def opened(book: Sessions) -> Session:
    return book.open("engine", 1)[0]


def test_the_limits_leave_half_of_the_address_space_to_the_daemon() -> None:
    assert MAPPED_BYTES_MAX < MAPPED_TOTAL_BYTES_MAX <= ADDRESS_SPACE_BYTES // 2


def test_a_session_maps_up_to_its_limit_and_what_is_refused_is_unmapped() -> None:
    book = Sessions(sessions_max=4)
    session = opened(book)
    book.keep(session, 1, Sparse(MAPPED_BYTES_MAX - 4096))
    over = Sparse(4097)
    with pytest.raises(BadRegion, match=f"4097 bytes is refused: its session has {MAPPED_BYTES_MAX - 4096} mapped"):
        book.keep(session, 2, over)
    assert over.closed and list(session.mappings) == [1]
    book.keep(session, 2, Sparse(4096))
    assert session.mapped_bytes == MAPPED_BYTES_MAX


def test_all_sessions_together_map_up_to_a_limit_until_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAPPED_TOTAL_BYTES_MAX", 10_000)
    book = Sessions(sessions_max=4)
    first, second = opened(book), opened(book)
    book.keep(first, 1, Sparse(6_000))
    over = Sparse(6_000)
    with pytest.raises(QueueFull, match="all sessions have 6000 mapped, at most 10000 may be"):
        book.keep(second, 2, over)
    assert over.closed
    book.end(first.session_id)
    book.keep(second, 2, Sparse(6_000))


async def test_a_sparse_file_beyond_the_limit_is_refused_and_the_session_goes_on(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.connect()
        with pytest.raises(ClientBadRegion, match="is refused: its session has"):
            await engine.pass_fd(MAPPED_BYTES_MAX + 4096)
        await engine.register()

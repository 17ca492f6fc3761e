"""Memory port: bytes of this process that devices may touch, named by address."""

from __future__ import annotations

from typing import Protocol


class Memory(Protocol):
    """A mapping: the pool's arena, or an engine's region. Stays mapped until `close`."""

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def page_kind(self) -> str:
        """What backs it, e.g. "2 MiB (hugetlb)", "2 MiB (transparent)" or "4 KiB"."""

    def close(self) -> None:
        """Unmap; only when no device touches it."""

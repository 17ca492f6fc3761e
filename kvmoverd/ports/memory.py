"""Memory port: bytes of this process that devices may touch, named by address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class GpuShare:
    """GPU memory that an engine shares: `size_bytes` from `offset_bytes` on of the allocation behind a CUDA IPC handle.

    `pci_address`: the GPU that it lies on, e.g. "0000:3b:00.0"; CUDA's own numbers differ between processes.
    """

    ipc_handle: bytes
    offset_bytes: int
    size_bytes: int
    pci_address: str


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


@runtime_checkable
class LentMemory(Memory, Protocol):
    """Memory of another process, which may free it only when it was given back; that happens beside the loop."""

    @property
    def given_back(self) -> bool:
        """True some time after `close`: nothing here refers to it any more."""

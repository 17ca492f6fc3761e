"""Memory port: bytes of this process that devices may touch, named by address."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Near:
    """Where an engine's memory is used, as far as the engine says: a GPU's PCI address, a NUMA node."""

    gpu_pci_address: str | None = None
    numa_node: int | None = None


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
class EngineMemory(Memory, Protocol):
    """A region: an engine's memory, which it gives and takes back."""

    def on_close(self, before_close: Callable[[], None]) -> None:
        """Has `before_close` called while the addresses are still this region's; at once where they are not any more.

        From any thread: when the region is closed meanwhile, perhaps twice.
        """


@runtime_checkable
class GpuRegion(EngineMemory, Protocol):
    """A region that lies on a GPU: no processor touches its addresses."""

    @property
    def dmabuf_fd(self) -> int:
        """A descriptor for RDMA devices; -1: there is none, `dmabuf_refusal` says why."""

    @property
    def dmabuf_offset_bytes(self) -> int:
        """Where the region begins in it."""

    @property
    def dmabuf_refusal(self) -> str: ...


@runtime_checkable
class LentMemory(Memory, Protocol):
    """Memory of another process, which may free it only when it was given back; that happens beside the loop."""

    @property
    def given_back(self) -> bool:
        """True some time after `close`: nothing here refers to it any more."""

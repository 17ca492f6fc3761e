"""Storage by the rings of 3FS: reads go around the kernel, from the filesystem's daemon straight into the pool.

Writes, probes and looks at damaged records go by threads and the mount, as on other filesystems.
"""

from __future__ import annotations

from dataclasses import replace

from kvmoverd.adapters.storage.blocks import Blocks
from kvmoverd.adapters.storage.engine_storage import EngineStorage
from kvmoverd.adapters.storage.read_engine import Ends, ReadEngine
from kvmoverd.adapters.storage.usrbio_fds import RegisteredFds
from kvmoverd.adapters.storage.usrbio_lane import SILENCE_S
from kvmoverd.adapters.storage.usrbio_reads import UsrbioReads
from kvmoverd.adapters.storage.usrbio_rings import UsrbioRings
from kvmoverd.ports.storage import StorageFacts


class UsrbioStorage(EngineStorage):
    """Storage port over `blocks`. Takes over the rings too, and closes both."""

    kind = "usrbio"
    reads: UsrbioReads

    def __init__(
        self,
        blocks: Blocks,
        rings: UsrbioRings,
        *,
        name: str,
        threads: int,
        ops_max: int,
        note: str = "",
        silence_s: float = SILENCE_S,
    ) -> None:
        fds = RegisteredFds(rings.library)

        def make_engine(ends: Ends) -> ReadEngine:
            return UsrbioReads(rings, fds, ends, name=name, silence_s=silence_s)

        blocks.on_close = fds.forget
        super().__init__(blocks, make_engine, name=name, threads=threads, ops_max=ops_max, note=note)

    @property
    def facts(self) -> StorageFacts:
        """The note says how many reads the library refused."""
        facts, refused = super().facts, self.reads.refused
        return replace(facts, note="; ".join(filter(None, [refused, facts.note]))) if refused else facts

"""The devices of a node, built from the config; storage and transports have modules of their own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from kvmoverd.adapters.memory.arena import Arena, available_bytes
from kvmoverd.adapters.memory.cuda import Gpus
from kvmoverd.adapters.memory.region import Regions
from kvmoverd.config import Config
from kvmoverd.core.errors import ConfigError
from kvmoverd.devices_storage import needs_shared_pool, open_storage
from kvmoverd.devices_transport import (
    CLOSE_S,
    CheckKey,
    Local,
    Rdma,
    Remote,
    close_transports,
    open_transports,
    transport_here,
)
from kvmoverd.ports.storage import Storage


@dataclass
class Devices:
    """What the node drives. Closed last: nothing above may use them any more. `regions` maps engines' memory.

    `local` and `remote` may be one and the same.
    """

    arena: Arena
    regions: Regions
    storage: Storage
    local: Local
    remote: Remote
    rdma: Rdma | None = None

    def close(self) -> bool:
        """True when no thread touches memory any more; only then is the arena unmapped."""
        quiet = [close_transports(self.local, self.remote), self.storage.close(CLOSE_S)]
        quiet.append(all(quiet) and self.regions.close(CLOSE_S))
        if all(quiet):
            self.arena.close()
        return all(quiet)


def open_devices(config: Config, boot_id: str, check_key: CheckKey) -> Devices:
    """Blocks while the arena is touched. Raises `KvmoverError`; nothing stays open then."""
    with ExitStack() as opened:
        arena = Arena(config.pool.bytes, config.pool.piece_bytes, shared=needs_shared_pool(config))
        opened.callback(arena.close)
        arena.touch()
        storage = open_storage(config, boot_id, arena)
        opened.callback(storage.close, CLOSE_S)
        regions = Regions(Gpus(arena, piece_bytes=config.pool.piece_bytes))
        transports = open_transports(config, boot_id, check_key, arena, regions)
        opened.pop_all()
        return Devices(arena, regions, storage, transports.local, transports.remote, transports.rdma)


def missing_here(config: Config) -> dict[str, str]:
    """What this machine lacks now for the config, by section, but for storage; `serve` would refuse."""
    found = {}
    transport = transport_here(config).get("not here")
    if transport is not None:
        found["transport"] = str(transport)
    available = available_bytes()
    if available is not None and config.pool.bytes > available:
        found["pool"] = (
            f"only {available >> 20}MiB of memory are available now; serve refuses, unless huge pages back the pool"
        )
    try:
        config.membership.check_files()
    except ConfigError as error:
        found["membership"] = str(error)
    return found

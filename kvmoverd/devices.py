"""The devices of a node, built from the config: a row per kind of transport; storage has a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvmoverd.adapters.memory.arena import Arena, available_bytes
from kvmoverd.adapters.memory.cuda import Gpus
from kvmoverd.adapters.memory.region import Regions
from kvmoverd.adapters.transport.null import NullTransport
from kvmoverd.adapters.transport.shm import ShmTransport
from kvmoverd.adapters.transport.tcp import Lane, TcpTransport
from kvmoverd.adapters.transport.verbs_refusal import refuse_verbs
from kvmoverd.config import Config
from kvmoverd.devices_storage import needs_shared_pool, open_storage
from kvmoverd.ports.storage import Storage

CLOSE_S = 3.0
"""How long each device may take to let go."""

CheckKey: TypeAlias = Callable[[bytes], tuple[str, str] | None]
"""(node, boot id) that a data channel's key was issued to; called in the transport's threads."""


@dataclass
class Devices:
    """What the node drives. Closed last: nothing above may use them any more. `regions` maps engines' memory."""

    arena: Arena
    regions: Regions
    storage: Storage
    local: ShmTransport | NullTransport
    remote: TcpTransport | ShmTransport

    def close(self) -> bool:
        """True when no thread touches memory any more; only then is the arena unmapped."""
        quiet = [self.local.close(CLOSE_S), self.remote.close(CLOSE_S), self.storage.close(CLOSE_S)]
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
        local = LOCALS[config.transport.local](config, boot_id, check_key, arena, regions)
        opened.callback(local.close, CLOSE_S)
        remote = TRANSPORTS[config.transport.kind](config, boot_id, check_key, arena)
        opened.pop_all()
        return Devices(arena, regions, storage, local, remote)


def _tcp(config: Config, boot_id: str, check_key: CheckKey, arena: Arena) -> TcpTransport:
    settings = config.transport
    return TcpTransport(
        config.node.name,
        boot_id,
        settings.listen.host,
        settings.listen.port,
        lane=Lane(dscp=settings.dscp, so_priority=settings.so_priority),
        check_key=check_key,
        io_timeout_s=settings.io_timeout_s,
        queue_max=settings.queue_max,
        connections=settings.connections,
    )


def _shm(
    config: Config,
    boot_id: str,
    check_key: CheckKey,
    socket: Path | None,
    arena: Arena,
    regions: Regions | None = None,
) -> ShmTransport:
    """Without a socket: within this process only."""
    settings = config.transport
    return ShmTransport(
        config.node.name,
        boot_id,
        socket,
        check_key=check_key,
        copy_threads=settings.copy_threads,
        io_timeout_s=settings.io_timeout_s,
        queue_max=settings.queue_max,
        arena=arena,
        regions=regions,
    )


def missing_here(config: Config) -> dict[str, str]:
    """What this machine lacks now for the config, by section, but for storage; `open_devices` would be refused."""
    found = {}
    available = available_bytes()
    if available is not None and config.pool.bytes > available:
        found["pool"] = (
            f"only {available >> 20}MiB of memory are available now; serve refuses, unless huge pages back the pool"
        )
    return found


LOCALS: dict[str, Callable[[Config, str, CheckKey, Arena, Regions], ShmTransport | NullTransport]] = {
    "shm": lambda config, boot_id, check_key, arena, regions: _shm(config, boot_id, check_key, None, arena, regions),
    "null": lambda config, boot_id, check_key, arena, regions: NullTransport(queue_max=config.transport.queue_max),
}
"""Within the node by `transport.local`."""

TRANSPORTS: dict[str, Callable[[Config, str, CheckKey, Arena], TcpTransport | ShmTransport]] = {
    "tcp": _tcp,
    "shm": lambda config, boot_id, check_key, arena: _shm(config, boot_id, check_key, config.transport.socket, arena),
    "verbs": lambda config, boot_id, check_key, arena: refuse_verbs(),
}
"""Node to node by `transport.kind`."""

"""How KV bytes go, built from the config: a row per kind of transport, between nodes and within this one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.memory.region import Regions
from kvmoverd.adapters.transport.null import NullTransport
from kvmoverd.adapters.transport.shm import ShmTransport
from kvmoverd.adapters.transport.tcp import Lane, TcpTransport
from kvmoverd.adapters.transport.verbs.transport import VerbsTransport
from kvmoverd.config import Config
from kvmoverd.config_transport import VerbsConfig
from kvmoverd.core.errors import TransportRefused
from kvmoverd.devices_verbs import Cnics, check_memlock, cnics_here, open_cnics, ports_here
from kvmoverd.ports.connection import RdmaFacts
from kvmoverd.ports.memory import Memory, Near

CLOSE_S = 3.0
"""How long each device may take to let go."""

CheckKey: TypeAlias = Callable[[bytes], tuple[str, str] | None]
"""(node, boot id) that a data channel's key was issued to; called in the transport's threads."""
Local: TypeAlias = ShmTransport | NullTransport | VerbsTransport
Remote: TypeAlias = TcpTransport | ShmTransport | VerbsTransport


@dataclass(frozen=True, slots=True)
class Rdma:
    """The CNICs and the transport over them: what the node asks of them beside moving KV."""

    cnics: Cnics
    links: VerbsTransport
    settings: VerbsConfig

    def adopt(self, memory: Memory, near: Near) -> None:
        """Registers a region. Blocks; raises `BadRegion`."""
        self.cnics.book.adopt(memory, near)

    def facts(self) -> RdmaFacts:
        return self.cnics.facts(self.links.facts, self.settings.marks)


@dataclass(frozen=True, slots=True)
class Transports:
    """`local` and `remote` may be one and the same."""

    local: Local
    remote: Remote
    rdma: Rdma | None


def open_transports(config: Config, boot_id: str, check_key: CheckKey, arena: Arena, regions: Regions) -> Transports:
    """Raises `KvmoverError`; nothing stays open then."""
    settings = config.transport
    with ExitStack() as opened:
        rdma = _rdma(config, arena) if settings.kind == "verbs" else None
        remote = rdma.links if rdma is not None else TRANSPORTS[settings.kind](config, boot_id, check_key, arena)
        opened.callback(remote.close, CLOSE_S)
        if rdma is not None and settings.local == "verbs":
            local: Local = rdma.links
        else:
            local = LOCALS[settings.local](config, boot_id, check_key, arena, regions)
        opened.pop_all()
    return Transports(local, remote, rdma)


def local_text(local: Local) -> str:
    """How bytes go within the node, for logs and status."""
    return "RDMA writes of a CNIC to itself" if isinstance(local, VerbsTransport) else local.copy_text


def close_transports(local: Local, remote: Remote) -> bool:
    """True when no thread and no device touches memory any more."""
    closed = [remote.close(CLOSE_S)]
    if local is not remote:
        closed.append(local.close(CLOSE_S))
    return all(closed)


def check_buildable(config: Config) -> None:
    """Refuses at once what `open_transports` could only refuse late. Raises `TransportRefused`."""
    if config.transport.kind == "verbs":
        ports_here(config.transport.verbs)
        check_memlock(config.pool.bytes)


def transport_here(config: Config) -> dict[str, object]:
    """What would be used on this machine, for `check`; under "not here" why it would be refused."""
    if config.transport.kind != "verbs":
        return {}
    try:
        found = cnics_here(config.transport.verbs)
        check_memlock(config.pool.bytes)
        return found
    except TransportRefused as error:
        return {"not here": str(error)}


def _rdma(config: Config, arena: Arena) -> Rdma:
    settings = config.transport
    cnics = open_cnics(settings.verbs, arena, config.pool.piece_bytes)
    links = VerbsTransport(
        cnics.fabrics,
        cnics.book,
        marks=settings.verbs.marks,
        io_timeout_s=settings.io_timeout_s,
        fence_s=settings.verbs.fence_s,
        queue_max=settings.queue_max,
        qps_max=settings.verbs.qps_max,
    )
    return Rdma(cnics, links, settings.verbs)


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


LOCALS: dict[str, Callable[[Config, str, CheckKey, Arena, Regions], Local]] = {
    "shm": lambda config, boot_id, check_key, arena, regions: _shm(config, boot_id, check_key, None, arena, regions),
    "null": lambda config, boot_id, check_key, arena, regions: NullTransport(queue_max=config.transport.queue_max),
}
"""Within the node by `transport.local`; "verbs" is the transport between nodes."""

TRANSPORTS: dict[str, Callable[[Config, str, CheckKey, Arena], Remote]] = {
    "tcp": _tcp,
    "shm": lambda config, boot_id, check_key, arena: _shm(config, boot_id, check_key, config.transport.socket, arena),
}
"""Node to node by `transport.kind`; "verbs" is a matter of `_rdma`."""

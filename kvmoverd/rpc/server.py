"""gRPC servers: the engine API on a Unix socket, the node-to-node API on TCP, health and reflection on both."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvmoverd.core.errors import ConfigError
from kvmoverd.rpc.call_limits import CallLimits

GrpcServer = grpc.aio.Server
MESSAGE_BYTES_MAX = 8 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


def keepalive(silence_s: float) -> tuple[tuple[str, int], ...]:
    """Channel or server options: a connection over which nothing comes back for about this long is closed."""
    half_ms = max(100, int(silence_s * 500))
    return (("grpc.keepalive_time_ms", half_ms), ("grpc.keepalive_timeout_ms", half_ms))


@dataclass
class Server:
    """A running server; `port` is 0 for Unix sockets."""

    server: grpc.aio.Server
    port: int
    health: health.aio.HealthServicer
    services: Sequence[str]

    async def set_serving(self, *, serving: bool) -> None:
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self.services:
            await self.health.set(service, state)

    async def stop(self, grace_s: float) -> None:
        """Calls that still run after `grace_s` are cut."""
        await self.set_serving(serving=False)
        await self.server.stop(grace_s)


async def start(
    address: str,
    service: str,
    add: Callable[[grpc.aio.Server], None],
    *,
    streams_max: int,
    always: frozenset[str] = frozenset(),
    options: Sequence[tuple[str, int]] = (),
) -> Server:
    """Starts a server at `unix:PATH` or `host:port`. Raises `ConfigError` when the address can't be had.

    `always`: calls of the service that are let through when `streams_max` others are under way. None of them waits.
    `options` stand in for those of the same name that every server has.
    """
    _check_free(address)
    limits = CallLimits(service, always, calls_max=streams_max)
    server = grpc.aio.server(
        # gRPC takes the first of two with one name.
        options=tuple((dict(OPTIONS) | dict(options)).items()),
        interceptors=[limits],
        maximum_concurrent_rpcs=limits.total_max,
    )
    add(server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"can't listen at {address}: {error}") from error
    await server.start()
    started = Server(server, 0 if address.startswith("unix:") else port, servicer, ("", service))
    await started.set_serving(serving=True)
    return started


def _check_free(address: str) -> None:
    """gRPC says that an address is taken, but not why, and writes to stderr on its own. Raises `ConfigError`."""
    kind, _, path = address.partition(":")
    if kind == "unix":
        if os.path.exists(path) and not Path(path).is_socket():
            raise ConfigError(f"can't listen at {path}: it exists and is no socket", path=path)
        return
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, int(port)), family=family).close()
    except OSError as error:
        raise ConfigError(f"can't listen at {address}: {error.strerror}", address=address) from error


def restrict(path: Path, mode: int) -> None:
    """Permissions of a Unix socket."""
    os.chmod(path, mode)

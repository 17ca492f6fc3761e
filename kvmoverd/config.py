"""The daemon's settings: typed, out of TOML, checked as a whole. The only reader of the environment.

Parts get values out of this, never the whole. Field names are the keys of the file; durations add `_s`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvmoverd.config_membership import MembershipConfig, membership_config
from kvmoverd.config_process import LOG_VARIABLE, LogConfig, ShutdownConfig, log_config, read_toml, shutdown_config
from kvmoverd.config_storage import NAME, NAME_FORM, ROOTS_MAX, StorageConfig, storage_roots
from kvmoverd.config_transport import TransportConfig, transport_config
from kvmoverd.core.errors import ConfigError
from kvmoverd.core.layout import Layout
from kvmoverd.toml_table import Address, Table, plain, size_text

DEFAULT_SOCKET = "/run/kvmoverd/kvmoverd.sock"
HUGE_PAGE_BYTES = 2 << 20
POOL_BYTES_MAX = 64 << 40
PIECE_BYTES_MAX = 1 << 30
TIMEOUT_S_MAX = 3600.0
PEERS_MAX = 4096
HELPERS_MAX = 8
"""Third nodes that read for one request."""
SCHEDULERS_MAX = 16
COMPANION_SUFFIX = ".companion"
EXAMPLE_NAME, EXAMPLE = "DeepSeek-V3.2 (61 layers, 64 tokens)", Layout.uniform(layers=61, tokens=64, token_bytes=656)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    name: str


@dataclass(frozen=True, slots=True)
class EngineApiConfig:
    """The Unix socket for engines; `mode` is its permissions, and those of the companion socket beside it."""

    socket: Path
    mode: int
    sessions_max: int
    streams_max: int


@dataclass(frozen=True, slots=True)
class NodeApiConfig:
    """The TCP socket for other nodes; `advertise` is the host under which they reach a data channel over TCP, empty for the one
    it listens on.

    A node that says nothing for `silence_s` counts as dead.
    """

    listen: Address
    advertise: str
    silence_s: float


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The DRAM pool. What `bytes` has beyond the sum of the four limits only caches; `prefetch_bytes` is a part of that."""

    bytes: int
    piece_bytes: int
    read_bytes: int
    de_buffer_bytes: int
    write_back_bytes: int
    help_bytes: int
    prefetch_bytes: int
    leases_max: int

    @property
    def limits_bytes(self) -> int:
        return self.read_bytes + self.de_buffer_bytes + self.write_back_bytes + self.help_bytes

    def sum_text(self) -> str:
        """The addition a reader can follow."""
        return (
            f"read_bytes {size_text(self.read_bytes)} + de_buffer_bytes {size_text(self.de_buffer_bytes)} + "
            f"write_back_bytes {size_text(self.write_back_bytes)} + help_bytes {size_text(self.help_bytes)} = "
            f"{size_text(self.limits_bytes)} of {size_text(self.bytes)}"
        )

    def slots_text(self, layout: Layout) -> str:
        """What the bytes mean in slots of one layout, if no other layout is in use."""
        slot_bytes = layout.record_bytes
        pieces, piece_slots = self.bytes // self.piece_bytes, self.piece_bytes // slot_bytes
        parts = (
            ("read", self.read_bytes),
            ("DE buffer", self.de_buffer_bytes),
            ("write-back", self.write_back_bytes),
            ("help", self.help_bytes),
        )
        limits = ", ".join(f"{name} {size // slot_bytes}" for name, size in parts)
        return (
            f"{slot_bytes:,} B a slot, {pieces} pieces of {piece_slots} slots = {pieces * piece_slots} slots; "
            f"at most: {limits}"
        )


@dataclass(frozen=True, slots=True)
class RequestsConfig:
    timeout_default_s: float
    timeout_max_s: float
    admission_wait_s: float
    attach_timeout_s: float
    lease_default_s: float
    queue_max: int
    live_max: int


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """Requests that several nodes read at once; `helper_nodes`: peers that may help, empty for all."""

    floor_s: float
    helpers_max: int
    helper_nodes: tuple[str, ...]
    helps: bool
    stall_s: float
    rebalances: bool


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Where schedulers may be, one of which leads; `timeout_s`: for an answer."""

    addresses: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of one daemon. `storage`: its roots in the order of reading. `peers` is node name to `host:port`."""

    node: NodeConfig
    engine_api: EngineApiConfig
    node_api: NodeApiConfig
    pool: PoolConfig
    storage: tuple[StorageConfig, ...]
    transport: TransportConfig
    requests: RequestsConfig
    split: SplitConfig
    peers: Mapping[str, str]
    scheduler: SchedulerConfig
    membership: MembershipConfig
    log: LogConfig
    shutdown: ShutdownConfig

    def data_endpoint(self, endpoint: str) -> str:
        """A transport's own endpoint as other nodes must dial it: `advertise` stands in for the listening host."""
        if self.transport.kind != "tcp" or not self.node_api.advertise:
            return endpoint
        return str(Address(self.node_api.advertise, int(endpoint.rpartition(":")[2])))

    def node_address(self, port: int) -> str:
        """Where other nodes dial this one's node-to-node API, which listens at this port."""
        return str(Address(self.node_api.advertise or self.node_api.listen.host, port))

    def describe(self) -> dict[str, object]:
        """Plain values for `check`: the file's keys with their defaults filled in, and what the pool's bytes mean."""
        found = {name: plain(name, getattr(self, name)) for name in self.__slots__}
        found["storage"] = [root.describe() for root in self.storage]
        pool = found["pool"]
        assert isinstance(pool, dict)
        pool["sum"] = self.pool.sum_text()
        pool["cache only"] = size_text(self.pool.bytes - self.pool.limits_bytes)
        pool[EXAMPLE_NAME] = self.pool.slots_text(EXAMPLE)
        return found


def load(path: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """Reads and checks a config file. Raises `ConfigError`; relative paths in it start at its own directory.

    `KVMOVERD_LOG` in the environment overrides `log.level`.
    """
    return parse(read_toml(path), path.resolve().parent, log_level=environ.get(LOG_VARIABLE))


def parse(values: Mapping[str, object], base: Path, *, log_level: str | None = None) -> Config:
    """Checks the content of a config file; `base` is where relative paths start, `log_level` beats the file's.

    Raises `ConfigError`.
    """
    root = Table(values, "")
    config = Config(
        node=_node(root.table("node")),
        engine_api=_engine_api(root.table("engine_api"), base),
        node_api=_node_api(root.table("node_api")),
        pool=_pool(root.table("pool")),
        storage=storage_roots(root.tables("storage", count_max=ROOTS_MAX), base),
        transport=transport_config(root.table("transport"), base),
        requests=_requests(root.table("requests")),
        split=_split(root.table("split")),
        membership=membership_config(root.table("membership"), base),
        peers=_peers(root.tables("peers", count_max=PEERS_MAX)),
        scheduler=_scheduler(root.table("scheduler")),
        log=log_config(root.table("log"), log_level),
        shutdown=shutdown_config(root.table("shutdown")),
    )
    root.done()
    _check_reachable(config)
    _check_helpers(config)
    return config


def _node(table: Table) -> NodeConfig:
    found = NodeConfig(name=table.text("name", pattern=NAME, form=NAME_FORM))
    table.done()
    return found


def _engine_api(table: Table, base: Path) -> EngineApiConfig:
    mode = table.text("mode", "0660", pattern="0?[67][0-7][0-7]", form='octal permissions such as "0660"')
    found = EngineApiConfig(
        socket=table.socket("socket", DEFAULT_SOCKET, base),
        mode=int(mode, 8),
        sessions_max=table.count("sessions_max", 256, 1, 65_536),
        streams_max=table.count("streams_max", 4096, 1, 65_536),
    )
    table.done()
    return found


def _node_api(table: Table) -> NodeApiConfig:
    found = NodeApiConfig(
        listen=table.address("listen", "0.0.0.0:9401", port_min=0),
        advertise=table.text(
            "advertise", "", pattern=r"[A-Za-z0-9.:_-]{0,253}", form="a host name or an IP address, no port"
        ),
        silence_s=table.duration_s("silence", 5.0, 0.1, 600.0),
    )
    table.done()
    return found


def _pool(table: Table) -> PoolConfig:
    piece_bytes = table.size_bytes("piece_bytes", 64 << 20, HUGE_PAGE_BYTES, PIECE_BYTES_MAX)
    _check_multiple(table.key("piece_bytes"), piece_bytes, HUGE_PAGE_BYTES, "one huge page")
    pool_bytes = table.size_bytes("bytes", None, piece_bytes, POOL_BYTES_MAX)
    _check_multiple(table.key("bytes"), pool_bytes, piece_bytes, table.key("piece_bytes"))
    share = _rounded(pool_bytes // 10)
    read_bytes = table.size_bytes("read_bytes", 4 * share, 1, POOL_BYTES_MAX)
    de_buffer_bytes = table.size_bytes("de_buffer_bytes", 4 * share, 1, POOL_BYTES_MAX)
    write_back_bytes = table.size_bytes("write_back_bytes", share, 1, POOL_BYTES_MAX)
    rest_bytes = max(0, pool_bytes - read_bytes - de_buffer_bytes - write_back_bytes)
    help_bytes = table.size_bytes("help_bytes", _rounded(min(share, rest_bytes) // 2), 0, POOL_BYTES_MAX)
    cache_bytes = max(0, rest_bytes - help_bytes)
    found = PoolConfig(
        bytes=pool_bytes,
        piece_bytes=piece_bytes,
        read_bytes=read_bytes,
        de_buffer_bytes=de_buffer_bytes,
        write_back_bytes=write_back_bytes,
        help_bytes=help_bytes,
        prefetch_bytes=table.size_bytes("prefetch_bytes", min(share, cache_bytes), 0, POOL_BYTES_MAX),
        leases_max=table.count("leases_max", 65_536, 1, 1 << 24),
    )
    if found.limits_bytes > found.bytes:
        raise ConfigError(f"{table.key('bytes')} is too small for its parts: {found.sum_text()}")
    if found.prefetch_bytes > cache_bytes:
        raise ConfigError(
            f"{table.key('prefetch_bytes')} is {size_text(found.prefetch_bytes)}, must be at most what only caches, "
            f"{size_text(cache_bytes)}: {found.sum_text()}"
        )
    table.done()
    return found


def _rounded(size_bytes: int) -> int:
    """Down to what is easy to read."""
    unit_bytes = 1 << 20 if size_bytes >= 1 << 20 else 1 << 10
    return size_bytes // unit_bytes * unit_bytes


def _check_multiple(key: str, size_bytes: int, unit_bytes: int, unit: str) -> None:
    if size_bytes % unit_bytes:
        below = size_bytes // unit_bytes * unit_bytes
        raise ConfigError(
            f"{key} is {size_text(size_bytes)}, must be a multiple of {unit}, {size_text(unit_bytes)}: "
            f"{size_text(below)} or {size_text(below + unit_bytes)}"
        )


def _requests(table: Table) -> RequestsConfig:
    timeout_max_s = table.duration_s("timeout_max", TIMEOUT_S_MAX, 1.0, TIMEOUT_S_MAX)
    found = RequestsConfig(
        timeout_default_s=table.duration_s("timeout_default", min(60.0, timeout_max_s), 0.1, timeout_max_s),
        timeout_max_s=timeout_max_s,
        admission_wait_s=table.duration_s("admission_wait", min(10.0, timeout_max_s), 0.0, timeout_max_s),
        attach_timeout_s=table.duration_s("attach_timeout", min(30.0, timeout_max_s), 0.1, timeout_max_s),
        lease_default_s=table.duration_s("lease_default", min(30.0, timeout_max_s), 0.1, timeout_max_s),
        queue_max=table.count("queue_max", 1024, 1, 65_536),
        live_max=table.count("live_max", 4096, 1, 65_536),
    )
    table.done()
    return found


def _split(table: Table) -> SplitConfig:
    found = SplitConfig(
        floor_s=table.duration_s("floor", 0.002, 0.0, 60.0),
        helpers_max=table.count("helpers_max", 2, 0, HELPERS_MAX),
        helper_nodes=table.texts("helper_nodes", count_max=PEERS_MAX, pattern=NAME, form=NAME_FORM),
        helps=table.flag("helps", default=True),
        stall_s=table.duration_s("stall", 1.0, 0.05, 60.0),
        rebalances=table.flag("rebalances", default=True),
    )
    table.done()
    return found


def _peers(tables: list[Table]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for table in tables:
        name = table.text("name", pattern=NAME, form=NAME_FORM)
        if name in found:
            raise ConfigError(f"{table.key('name')} is {name!r}, which another peer has too")
        found[name] = str(table.address("address", None, port_min=1))
        table.done()
    return MappingProxyType(found)


def _scheduler(table: Table) -> SchedulerConfig:
    found = SchedulerConfig(
        addresses=tuple(str(address) for address in table.addresses("addresses", count_max=SCHEDULERS_MAX)),
        timeout_s=table.duration_s("timeout", 2.0, 0.1, 60.0),
    )
    table.done()
    return found


def _check_reachable(config: Config) -> None:
    """Other nodes are told where to dial; "every interface" is no place to dial."""
    in_etcd, advertise = config.membership.etcd is not None, config.node_api.advertise
    if in_etcd and config.peers:
        raise ConfigError(
            f'{len(config.peers)} [[peers]] are given, and membership.kind is "etcd", which has its own: take them out, or '
            'make it "static"'
        )
    if Address(advertise, 0).is_wildcard:
        raise ConfigError(f"node_api.advertise is {advertise!r}, must be one host: nobody can dial every interface")
    dialled = {"node_api.listen": config.node_api.listen} if in_etcd else {}
    if config.transport.kind == "tcp" and (in_etcd or config.peers):
        dialled["transport.listen"] = config.transport.listen
    nobody = "no other node" if in_etcd else f"none of the {len(config.peers)} [[peers]]"
    for key, listen in dialled.items():
        if listen.is_wildcard and not advertise:
            raise ConfigError(
                f"node_api.advertise is missing: {key} is {listen}, which {nobody} can dial; name the host they reach this "
                "node under"
            )


def _check_helpers(config: Config) -> None:
    for index, name in enumerate(config.split.helper_nodes if config.membership.etcd is None else ()):
        if name not in config.peers:
            raise ConfigError(
                f"split.helper_nodes[{index}] is {name!r}, which none of the {len(config.peers)} [[peers]] has"
            )

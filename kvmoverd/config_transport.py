"""The [transport] table of the config: how KV bytes go between nodes and within one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvmoverd.core.errors import ConfigError
from kvmoverd.core.pci import pci_address
from kvmoverd.core.qos import FLOW_LABEL_MAX, KV_LANE, SERVICE_LEVEL_MAX, TRAFFIC_CLASS_MAX, KvClass, Marks
from kvmoverd.toml_table import Address, Table

DEFAULT_DATA_SOCKET = "/run/kvmoverd/data.sock"
CNIC = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}(:\d{1,3})?"
CNIC_FORM = 'an RDMA device, with a port where it has several: "mlx5_0" or "mlx5_0:1"'
CNICS_MAX = 64
GPUS_MAX = 256
GID_INDEX_MAX = 65_535
QPS_MAX = 65_536
LANE_FLOOR_MAX = 1 << 40


@dataclass(frozen=True, slots=True)
class VerbsConfig:
    """RDMA. `devices`: those to use, empty for all that are up; `gid_index` -1: chosen by rank.

    `timeout` and `retry` are those of a queue pair: 4.096 us * 2^timeout for an answer, so often asked again. `classes` has
    the marks of every `KvClass` by its name, `gpus` the CNIC of each GPU that has one by hand.
    """

    devices: tuple[str, ...]
    exclude: tuple[str, ...]
    gid_index: int
    service_level: int
    traffic_class: int
    flow_label: int
    timeout: int
    retry: int
    fence_s: float
    qps_max: int
    classes: Mapping[str, Marks]
    gpus: Mapping[str, str]

    @property
    def marks(self) -> dict[KvClass, Marks]:
        return {kv_class: self.classes[kv_class.value] for kv_class in KvClass}


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """KV bytes between nodes: "tcp" uses `listen`, `dscp`, `so_priority` and `connections`, "shm" `socket`, "verbs" `verbs`.

    `local`: how they go within the node. `lane_floor`: bytes a second that the KV lane must get while it has work, 0 for none,
    judged over `lane_window_s`.
    """

    kind: str
    local: str
    listen: Address
    socket: Path
    dscp: int
    so_priority: int
    io_timeout_s: float
    queue_max: int
    connections: int
    copy_threads: int
    lane_floor: int
    lane_window_s: float
    verbs: VerbsConfig

    def lanes(self) -> tuple[dict[KvClass, str], int, float]:
        """What packets of each class are to carry, in words; the floor in bytes a second; the window in seconds.

        Classes with equal words share one lane.
        """
        if self.kind == "verbs":
            marks = {kv_class: found.text for kv_class, found in self.verbs.marks.items()}
        elif self.kind == "tcp":
            marks = dict.fromkeys(KvClass, f"DSCP {self.dscp}, SO_PRIORITY {self.so_priority}")
        else:
            marks = dict.fromkeys(KvClass, "shared memory: no network, no lane")
        return marks, self.lane_floor, self.lane_window_s


def transport_config(table: Table, base: Path) -> TransportConfig:
    """Raises `ConfigError`."""
    found = TransportConfig(
        kind=table.choice("kind", "tcp", ("tcp", "shm", "verbs")),
        local=table.choice("local", "shm", ("shm", "null", "verbs")),
        listen=table.address("listen", "0.0.0.0:0", port_min=0),
        socket=table.socket("socket", DEFAULT_DATA_SOCKET, base),
        dscp=table.count("dscp", 8, 0, 63),
        so_priority=table.count("so_priority", 1, 0, 6),
        io_timeout_s=table.duration_s("io_timeout", 10.0, 0.1, 600.0),
        queue_max=table.count("queue_max", 4096, 1, 65_536),
        connections=table.count("connections", 2, 1, 16),
        copy_threads=table.count("copy_threads", 2, 1, 64),
        lane_floor=table.size_bytes("lane_floor", 0, 0, LANE_FLOOR_MAX),
        lane_window_s=table.duration_s("lane_window", 1.0, 0.1, 60.0),
        verbs=_verbs(table.table("verbs")),
    )
    table.done()
    if found.local == "verbs" and found.kind != "verbs":
        raise ConfigError(
            f'{table.key("local")} is "verbs" and {table.key("kind")} is "{found.kind}": the CNICs are opened for "verbs" only'
        )
    return found


def _verbs(table: Table) -> VerbsConfig:
    lane = _marks(table, KV_LANE)
    found = VerbsConfig(
        devices=table.texts("devices", count_max=CNICS_MAX, pattern=CNIC, form=CNIC_FORM),
        exclude=table.texts("exclude", count_max=CNICS_MAX, pattern=CNIC, form=CNIC_FORM),
        gid_index=table.count("gid_index", -1, -1, GID_INDEX_MAX),
        service_level=lane.service_level,
        traffic_class=lane.traffic_class,
        flow_label=lane.flow_label,
        timeout=table.count("timeout", 14, 1, 31),
        retry=table.count("retry", 7, 0, 7),
        fence_s=table.duration_s("fence", 1.0, 0.01, 60.0),
        qps_max=table.count("qps_max", 4096, 1, QPS_MAX),
        classes=_classes(table.table("classes"), lane),
        gpus=_gpus(table.table("gpus")),
    )
    table.done()
    both = sorted(set(found.devices) & set(found.exclude))
    if both:
        raise ConfigError(f"{table.key('exclude')} names {both[0]}, and so does {table.key('devices')}")
    return found


def _classes(table: Table, lane: Marks) -> Mapping[str, Marks]:
    """Of every class, those of the lane where its own table says nothing else."""
    found = {}
    for kv_class in KvClass:
        own = table.table(kv_class.value)
        found[kv_class.value] = _marks(own, lane)
        own.done()
    table.done()
    return MappingProxyType(found)


def _marks(table: Table, default: Marks) -> Marks:
    numbers = (
        table.count("service_level", default.service_level, 0, SERVICE_LEVEL_MAX),
        table.count("traffic_class", default.traffic_class, 0, TRAFFIC_CLASS_MAX),
        table.count("flow_label", default.flow_label, 0, FLOW_LABEL_MAX),
    )
    try:
        return Marks(*numbers)
    except ConfigError as error:
        raise ConfigError(table.key(str(error))) from None


def _gpus(table: Table) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name in table.names(count_max=GPUS_MAX):
        cnic = table.text(name, pattern=CNIC, form=CNIC_FORM)
        try:
            address = pci_address(name)
        except ValueError as error:
            raise ConfigError(f"{table.key(name)}: {error}") from None
        if address in found:
            raise ConfigError(f"{table.key(name)}: GPU {address} stands there twice")
        found[address] = cnic
    table.done()
    return MappingProxyType(found)

"""The scheduler's settings: typed, out of TOML, checked as a whole. Field names are the keys of the file; durations add `_s`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from kvmoverd.config_membership import MembershipConfig, membership_config
from kvmoverd.config_process import LOG_VARIABLE, LogConfig, ShutdownConfig, log_config, read_toml, shutdown_config
from kvmoverd.core.errors import BadRequest, ConfigError
from kvmoverd.core.scheduling.joint_settings import BOUNDS, WEIGHT_MAX, WEIGHT_MIN, JointSettings
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.policies import POLICIES
from kvmoverd.core.scheduling.reports import NAME_CHARS_MAX, TOKENS_MAX
from kvmoverd.core.scheduling.state import Model
from kvmoverd.toml_table import Address, Table, duration_text, plain

POLICY = "joint"
MODELS_MAX = 256
TENANTS_MAX = 4096
MODEL_NAME, MODEL_NAME_FORM = rf"(?s).{{1,{NAME_CHARS_MAX}}}", f"1 to {NAME_CHARS_MAX} characters"
KV_BYTES_MAX = 1 << 32
RATE_MAX = 1 << 50
COUNT_MAX = 1 << 40
TIME_S_MAX = 24 * 3600.0
JOURNAL_BYTES_MIN, JOURNAL_BYTES_MAX = 1 << 20, 1 << 50

Settings = TypeVar("Settings")
Bounds = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class JournalConfig:
    """The decision log; `path` None: none is kept. At `bytes_max` the file is moved to PATH.1, in the place of the former one."""

    path: Path | None
    bytes_max: int
    queue_max: int


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`advertise`: the address under which daemons reach this scheduler, as an election names it; empty for `listen`.

    Nodes report every `report_interval_s`, leaders pull every `pull_interval_s`, all of them together
    `reports_per_s` and `pulls_per_s` times a second at most: with many of them each comes less often.
    """

    listen: Address
    advertise: str
    policy: str
    report_interval_s: float
    pull_interval_s: float
    pulls_per_s: int
    reports_per_s: int
    journal: JournalConfig


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """`listen`: where Prometheus asks over HTTP; None: nowhere."""

    listen: Address | None


@dataclass(frozen=True, slots=True)
class SchedulerFile:
    """All settings of one scheduler. `waits_max`, of [limits]: calls that wait for a change of a ticket.

    `joint`: what the policy of that name goes by; its `weights` are [tenants].
    """

    scheduler: SchedulerConfig
    models: tuple[Model, ...]
    limits: Limits
    waits_max: int
    joint: JointSettings
    metrics: MetricsConfig
    membership: MembershipConfig
    log: LogConfig
    shutdown: ShutdownConfig

    def describe(self) -> dict[str, object]:
        """Plain values for `--check`: the file's keys with their defaults filled in."""
        found = {name: plain(name, getattr(self, name)) for name in self.__slots__}
        found["models"] = [plain("models", model) for model in self.models]
        found["limits"] = {**_described(self.limits), "waits_max": found.pop("waits_max")}
        joint = found["joint"] = _described(self.joint)
        found["tenants"] = dict(self.joint.weights)
        del joint["weights"]
        return found


def load(path: Path, environ: Mapping[str, str] = os.environ) -> SchedulerFile:
    """Reads and checks a config file. Raises `ConfigError`; relative paths in it start at its own directory.

    `KVMOVERD_LOG` in the environment overrides `log.level`.
    """
    return parse(read_toml(path), path.resolve().parent, log_level=environ.get(LOG_VARIABLE))


def parse(values: Mapping[str, object], base: Path, *, log_level: str | None = None) -> SchedulerFile:
    """Checks the content of a config file; `base` is where relative paths start, `log_level` beats the file's.

    Raises `ConfigError`.
    """
    root = Table(values, "")
    limits = root.table("limits")
    waits_max = limits.count("waits_max", 16_384, 1, 1 << 20)
    config = SchedulerFile(
        scheduler=_scheduler(root.table("scheduler"), base),
        models=_models(root.tables("models", count_max=MODELS_MAX)),
        limits=_settings(limits, Limits, {}),
        waits_max=waits_max,
        joint=_settings(root.table("joint"), JointSettings, BOUNDS, weights=_tenants(root.table("tenants"))),
        metrics=_metrics(root.table("metrics")),
        membership=membership_config(root.table("membership"), base),
        log=log_config(root.table("log"), log_level),
        shutdown=shutdown_config(root.table("shutdown"), 1.0),
    )
    root.done()
    _check_intervals(config)
    _check_reachable(config)
    return config


def _check_reachable(config: SchedulerFile) -> None:
    asked = config.scheduler
    if config.membership.etcd is not None and asked.listen.is_wildcard and not asked.advertise:
        raise ConfigError(
            f"scheduler.advertise is missing: scheduler.listen is {asked.listen}, which no daemon can dial; name the one "
            "that they reach it under"
        )


def _scheduler(table: Table, base: Path) -> SchedulerConfig:
    found = SchedulerConfig(
        listen=table.address("listen", "0.0.0.0:9402", port_min=0),
        advertise=_advertised(table),
        policy=table.choice("policy", POLICY, sorted(POLICIES)),
        report_interval_s=table.duration_s("report_interval", 0.2, 0.01, 60.0),
        pull_interval_s=table.duration_s("pull_interval", 0.02, 0.001, 60.0),
        pulls_per_s=table.count("pulls_per_s", 1_000, 1, 1_000_000),
        reports_per_s=table.count("reports_per_s", 1_000, 1, 1_000_000),
        journal=_journal(table.table("journal"), base),
    )
    table.done()
    return found


def _advertised(table: Table) -> str:
    """Empty, or an address that can be dialled."""
    found = _optional_address(table, "advertise", port_min=1)
    if found is not None and found.is_wildcard:
        raise ConfigError(f"{table.key('advertise')} is {found}, which no daemon can dial: name one host")
    return "" if found is None else str(found)


def _journal(table: Table, base: Path) -> JournalConfig:
    asked = table.text("path", "", pattern=r"[^\0]*", form="a path")
    found = JournalConfig(
        path=table.path("path", None, base) if asked else None,
        bytes_max=table.size_bytes("bytes_max", 1 << 30, JOURNAL_BYTES_MIN, JOURNAL_BYTES_MAX),
        queue_max=table.count("queue_max", 65_536, 4, 1 << 24),
    )
    table.done()
    return found


def _models(tables: list[Table]) -> tuple[Model, ...]:
    if not tables:
        raise ConfigError("models is missing and has no default: a [[models]] table for each model that is scheduled")
    found: dict[str, Model] = {}
    for table in tables:
        model = _model(table)
        if model.name in found:
            raise ConfigError(f"{table.key('name')} is {model.name!r}, which another model has too")
        found[model.name] = model
    return tuple(found.values())


def _model(table: Table) -> Model:
    """With alpha and beta in tokens, or the rates that they come from."""
    name = table.text("name", pattern=MODEL_NAME, form=MODEL_NAME_FORM)
    kv_bytes = table.size_bytes("kv_bytes_per_token", None, 1, KV_BYTES_MAX)
    given = table.names(count_max=64)
    if "alpha_tokens" in given or "beta_tokens" in given:
        for rate in ("storage_rate", "gpu_tokens_per_s"):
            if rate in given:
                raise ConfigError(
                    f"{table.key(rate)} stands beside alpha_tokens and beta_tokens, which it would give: take one out"
                )
        alpha = table.count("alpha_tokens", None, 1, TOKENS_MAX)
        beta = table.count("beta_tokens", None, 1, TOKENS_MAX)
        table.done()
        return Model(name, kv_bytes, alpha, beta)
    storage_bytes_per_s = table.size_bytes("storage_rate", None, 1, RATE_MAX)
    gpu_tokens_per_s = table.count("gpu_tokens_per_s", None, 1, TOKENS_MAX)
    table.done()
    return _refused_as(
        f"{table.key('storage_rate')}: ",
        lambda: Model.of(
            name,
            kv_bytes_per_token=kv_bytes,
            snic_bytes_per_s=storage_bytes_per_s,
            gpu_tokens_per_s=gpu_tokens_per_s,
        ),
    )


def _tenants(table: Table) -> tuple[tuple[str, float], ...]:
    """Weights by name."""
    return tuple(
        (name, table.fraction(name, 1.0, WEIGHT_MIN, WEIGHT_MAX)) for name in table.names(count_max=TENANTS_MAX)
    )


def _metrics(table: Table) -> MetricsConfig:
    found = MetricsConfig(listen=_optional_address(table, "listen", port_min=0))
    table.done()
    return found


def _optional_address(table: Table, name: str, *, port_min: int) -> Address | None:
    """`HOST:PORT`; None for an empty text."""
    return table.address(name, None, port_min=port_min) if table.text(name, "") else None


def _settings(table: Table, kind: Callable[..., Settings], bounds: Bounds, **given: object) -> Settings:
    """A dataclass of the core with a default for each field: durations in nanoseconds are durations here, the others numbers.

    `given`: fields that come from elsewhere. What `bounds` says nothing of is above 0; the class's own check has the last word.
    """
    defaults = kind()
    names = [item.name for item in fields(defaults) if item.name not in given]  # type: ignore[arg-type]  # a dataclass
    found = {name: _setting(table, name, getattr(defaults, name), bounds.get(name)) for name in names}
    table.done()
    return _refused_as(table.key(""), lambda: kind(**found, **given))


def _setting(table: Table, name: str, default: object, bounds: tuple[float, float] | None) -> object:
    assert isinstance(default, int | float), f"{name}: {default!r}"
    if name.endswith("_ns"):
        low_s, high_s = (bounds[0] / 1e9, bounds[1] / 1e9) if bounds else (0.001, TIME_S_MAX)
        return round(table.duration_s(name.removesuffix("_ns"), default / 1e9, low_s, high_s) * 1e9)
    low, high = bounds or (1, COUNT_MAX)
    if isinstance(default, int):
        return table.count(name, default, int(low), int(high))
    return table.fraction(name, default, low, high)


def _described(settings: object) -> dict[str, Any]:
    """As the file has them."""
    values = {item.name: getattr(settings, item.name) for item in fields(settings)}  # type: ignore[arg-type]
    return {
        name.removesuffix("_ns"): duration_text(value / 1e9) if name.endswith("_ns") else value
        for name, value in values.items()
    }


def _refused_as(prefix: str, make: Callable[[], Settings]) -> Settings:
    """What the core refuses is refused under its key."""
    try:
        return make()
    except BadRequest as error:
        raise ConfigError(f"{prefix}{error}") from None


def _check_intervals(config: SchedulerFile) -> None:
    """Who reports as often as it is told to must not be taken for dead."""
    for key, interval_s, limit, silent_ns in (
        ("report_interval", config.scheduler.report_interval_s, "node_silent", config.limits.node_silent_ns),
        ("pull_interval", config.scheduler.pull_interval_s, "group_silent", config.limits.group_silent_ns),
    ):
        if interval_s * 4 > silent_ns / 1e9:
            raise ConfigError(
                f"scheduler.{key} is {duration_text(interval_s)}, must be at most a quarter of limits.{limit}, which is "
                f"{duration_text(silent_ns / 1e9)}: one that is late would be taken for dead"
            )

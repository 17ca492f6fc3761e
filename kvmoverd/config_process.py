"""What every process of ours is configured with: its log, its end; and how a config file is read."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from kvmoverd.core.errors import ConfigError
from kvmoverd.toml_table import Table

LOG_VARIABLE = "KVMOVERD_LOG"
LOG_LEVELS = ("debug", "info", "warning", "error")
DRAIN_S_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: str
    format: str


@dataclass(frozen=True, slots=True)
class ShutdownConfig:
    drain_s: float


def read_toml(path: Path) -> dict[str, object]:
    """The content of a config file. Raises `ConfigError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error


def log_config(table: Table, level: str | None) -> LogConfig:
    """`level`, of the environment, beats the file's. Raises `ConfigError`."""
    if level is not None and level.lower() not in LOG_LEVELS:
        raise ConfigError(f"{LOG_VARIABLE} is {level[:128]!r}, must be one of {', '.join(LOG_LEVELS)}")
    found = LogConfig(
        level=table.choice("level", "info", LOG_LEVELS),
        format=table.choice("format", "text", ("text", "json")),
    )
    table.done()
    return found if level is None else replace(found, level=level.lower())


def shutdown_config(table: Table, default_s: float = 10.0) -> ShutdownConfig:
    """Raises `ConfigError`."""
    found = ShutdownConfig(drain_s=table.duration_s("drain", default_s, 0.0, DRAIN_S_MAX))
    table.done()
    return found

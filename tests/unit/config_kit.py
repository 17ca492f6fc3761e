"""Configs for tests: a text with one key changed."""

from __future__ import annotations

import tomllib
from typing import Any


def with_key(text: str, path: str, value: object) -> dict[str, Any]:
    """The text's values with one key changed: `pool.bytes`, or `storage.0.name`; None takes it away."""
    values: Any = tomllib.loads(text)
    *parents, last = path.split(".")
    at = values
    for name in parents:
        at = at[int(name)] if name.isdigit() else at.setdefault(name, {})
    if value is None:
        del at[last]
    else:
        at[last] = value
    found: dict[str, Any] = values
    return found

"""RDMA verbs: this build says why it can't, instead of falling back to something slower without a word."""

from __future__ import annotations

from typing import NoReturn

from kvmoverd.core.errors import TransportRefused


def refuse_verbs() -> NoReturn:
    """Raises `TransportRefused`."""
    raise TransportRefused(
        'transport.kind = "verbs": this build has no verbs adapter yet; "tcp" works between machines, "shm" within one'
    )

"""Addresses of libibverbs' own structs behind the objects of pyverbs, which doesn't tell them.

They are found by content: each word of an object that could be an address is read through the kernel, so that a wrong one is
an error and never a signal, and believed only where all that pyverbs tells of the object agrees with what lies there.
Without one nothing is lost but speed: pyverbs does the work.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from kvmoverd.adapters.memory import libc

# Parts of the structs' public beginnings, which the binary interface of libibverbs keeps as they are.
QUEUE_PAIR = struct.Struct("<Q8xQ28xI4xI")
"""`struct ibv_qp`: context, pd, qp_num, qp_type."""
DOMAIN = struct.Struct("<QI")
"""`struct ibv_pd`: context, handle."""
CONTEXT = struct.Struct("<264xi4xi")
"""`struct ibv_context`: cmd_fd, num_comp_vectors."""
ADDRESS_MIN = 1 << 16
ADDRESS_MAX = (1 << 57) - 1


def queue_pair_address(pair: Any, domain: Any, context: Any) -> int:
    """Of the `struct ibv_qp` behind a `pyverbs.qp.QP`; 0: not found, or found twice."""

    def agrees(address: int) -> bool:
        found = _read(address, QUEUE_PAIR)
        return (
            found is not None
            and found[2:] == (pair.qp_num, pair.qp_type)
            and _is_domain(found[1], domain, context)
            and _read(found[1], DOMAIN) == (found[0], domain.handle)
        )

    return _found(pair, agrees)


def domain_address(domain: Any, context: Any) -> int:
    """Of the `struct ibv_pd` behind a `pyverbs.pd.PD`; 0: not found, or found twice."""
    return _found(domain, lambda address: _is_domain(address, domain, context))


def _is_domain(address: int, domain: Any, context: Any) -> bool:
    found = _read(address, DOMAIN)
    return found is not None and found[1] == domain.handle and _is_context(found[0], context)


def _is_context(address: int, context: Any) -> bool:
    found = _read(address, CONTEXT)
    if found is None or found[1] != context.num_comp_vectors:
        return False
    told = getattr(context, "cmd_fd", None)
    return told is None or found[0] == told


def _found(thing: Any, agrees: Callable[[int], bool]) -> int:
    """Looks at the words of the object itself, which is ours to read. `thing` is alive, being an argument."""
    size_bytes = type(thing).__basicsize__
    words = np.frombuffer(ctypes.string_at(id(thing), size_bytes), dtype=np.uint64)
    found = [int(word) for word in np.unique(words) if agrees(int(word))]
    return found[0] if len(found) == 1 else 0


def _read(address: int, form: struct.Struct) -> tuple[int, ...] | None:
    """None where nothing can be read, or where no struct can lie."""
    if address % 8 or not ADDRESS_MIN <= address <= ADDRESS_MAX - form.size:
        return None
    target = ctypes.create_string_buffer(form.size)
    rows = np.array([[ctypes.addressof(target), form.size], [address, form.size]], dtype=np.uint64)
    first = rows.ctypes.data
    try:
        if libc.pull_slices(os.getpid(), first, 1, first + rows.strides[0], 1) != form.size:
            return None
    except OSError:
        return None
    return form.unpack(target.raw)

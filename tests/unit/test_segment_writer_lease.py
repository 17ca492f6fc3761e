"""The heartbeat page of an author."""

from __future__ import annotations

import numpy as np
import pytest

from kvmoverd.core.store.lease_page import MACHINE_BYTES_MAX, Lease, decode_lease, encode_lease
from kvmoverd.core.store.places import PAGE_BYTES

LEASE = Lease(beat=7, pid=4242, start_ticks=99, log=3, segment=12, machine="höst/boot/pid:1")


@pytest.mark.parametrize("ended", [False, True])
def test_a_lease_is_read_back(ended: bool) -> None:
    lease = Lease(7, 4242, 99, 3, 12, "höst/boot/pid:1", ended)
    raw = encode_lease(lease)
    assert len(raw) == PAGE_BYTES and decode_lease(raw) == lease


def test_a_long_machine_name_is_cut() -> None:
    back = decode_lease(encode_lease(Lease(1, 1, 1, 1, 1, "m" * 9999)))
    assert back is not None and back.machine == "m" * MACHINE_BYTES_MAX


def test_what_is_short_zero_or_damaged_is_no_lease() -> None:
    raw = encode_lease(LEASE)
    assert decode_lease(raw[:100]) is None and decode_lease(bytes(PAGE_BYTES)) is None
    for at in np.random.default_rng(1).integers(0, PAGE_BYTES, 200).tolist():
        bad = bytearray(raw)
        bad[at] ^= 1 << at % 8
        assert decode_lease(bytes(bad)) is None

"""Chains by the compiled helper and by its pyverbs twin: the same requests, one doorbell; what is refused posts nothing."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvmoverd.adapters.transport.verbs.fabric import WRITE, FabricError, Writes
from kvmoverd.adapters.transport.verbs.library import load
from kvmoverd.adapters.transport.verbs.posting import COMPILED, MIDDLE, Chain, CompiledPosts, check
from kvmoverd.core.errors import TransportRefused
from tests.bench.daemon import BenchFailed
from tests.bench.null_device import NullDevice, address_of_request

pytestmark = pytest.mark.contract
needs_helper = pytest.mark.skipif(
    not COMPILED, reason="needs the compiled posting helper: built without libibverbs-dev"
)
SIGNALED, WRITE_OPCODE, WRITE_IMMEDIATE_OPCODE, SEND_OPCODE, RECEIVED = 2, 0, 1, 2, 128
SEND_WR_FIELDS = ("work_id", "local", "remote", "size_bytes", "local_key", "remote_key", "opcode", "flags", "immediate")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("null_device")


@pytest.fixture
def open_null(directory: Path) -> Iterator[Callable[..., NullDevice]]:
    opened: list[NullDevice] = []

    def open_one(**settings: int) -> NullDevice:
        try:
            opened.append(NullDevice(directory, **settings))
        except BenchFailed as why:
            pytest.skip(f"needs a C compiler and libibverbs-dev: {why}")
        return opened[-1]

    yield open_one
    for device in opened:
        device.close()


@pytest.fixture
def chain() -> Iterator[Chain]:
    try:
        found = Chain(load())
    except TransportRefused as why:
        pytest.skip(f"needs pyverbs: {why}")
    yield found
    found.close()


def some_writes(count: int, seed: int = 1) -> Writes:
    rng = np.random.default_rng(seed)
    found = np.zeros(count, WRITE)
    for name in ("local", "remote"):
        found[name] = rng.integers(1, 1 << 48, count, dtype=np.uint64)
    for name in ("size_bytes", "local_key", "remote_key"):
        found[name] = rng.integers(1, 1 << 32, count, dtype=np.uint32)
    return found


@needs_helper
@pytest.mark.parametrize("immediate", [None, 0, 0xFEEDBEEF, (1 << 32) - 1])
def test_a_chain_is_one_doorbell_with_its_end_signalled(
    open_null: Callable[..., NullDevice], immediate: int | None
) -> None:
    device, writes = open_null(), some_writes(100)
    CompiledPosts(device.pair).writes(writes, 42, immediate)
    found = device.entries()
    assert len(found) == 100 and set(found["chain"]) == {0}
    for name in ("local", "remote", "size_bytes", "local_key", "remote_key"):
        assert (found[name] == writes[name]).all()
    assert list(found["flags"]) == [0] * 99 + [SIGNALED]
    assert list(found["work_id"]) == [MIDDLE] * 99 + [42]
    last = WRITE_OPCODE if immediate is None else WRITE_IMMEDIATE_OPCODE
    assert list(found["opcode"]) == [WRITE_OPCODE] * 99 + [last]
    assert int.from_bytes(int(found["immediate"][-1]).to_bytes(4, "little"), "big") == (immediate or 0)


@needs_helper
@pytest.mark.parametrize("lengths", [(1,), (64,), (5, 1, 64, 3, 64, 200)])
def test_the_twin_builds_what_the_helper_posts(
    open_null: Callable[..., NullDevice], chain: Chain, lengths: tuple[int, ...]
) -> None:
    helped, twin = open_null(), open_null()
    for number, length in enumerate(lengths, 1):
        writes, immediate = some_writes(length, seed=number), (None, number)[number % 2]
        CompiledPosts(helped.pair).writes(writes, number << 32, immediate)
        head = chain.build(writes, number << 32, immediate)
        first_id = MIDDLE if length > 1 else number << 32
        assert twin.post(address_of_request(head, first_id)) == 0
    for name in SEND_WR_FIELDS:
        assert (helped.entries()[name] == twin.entries()[name]).all(), name
    assert (helped.entries()["chain"] == twin.entries()["chain"]).all()


def test_the_twin_uses_its_requests_again_and_keeps_no_memory(chain: Chain) -> None:
    writes = some_writes(256)
    for _ in range(20):
        chain.build(writes, 1, 1)
    gc.collect()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1_000):
        chain.build(writes, 1, None)
    # 256,000 requests and elements, had they been made anew, would have kept 64 bytes each of C memory: 16 MiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 4 << 10


@needs_helper
def test_messages_and_receive_slots_are_one_element_each(open_null: Callable[..., NullDevice]) -> None:
    device = open_null()
    posts = CompiledPosts(device.pair)
    posts.message(0x1000, 77, 5, 11)
    posts.receive(0x2000, 88, 6, 12)
    sent, received = device.entries()
    names = ("work_id", "local", "size_bytes", "local_key", "opcode")
    assert [int(sent[name]) for name in names] == [11, 0x1000, 77, 5, SEND_OPCODE]
    assert int(sent["flags"]) == SIGNALED
    assert [int(received[name]) for name in names] == [12, 0x2000, 88, 6, RECEIVED]


@needs_helper
def test_a_full_queue_says_how_much_it_took(open_null: Callable[..., NullDevice]) -> None:
    posts = CompiledPosts(open_null(takes_max=7).pair)
    with pytest.raises(FabricError, match=r"posting writes was refused: .*took 7 of 10: Cannot allocate memory"):
        posts.writes(some_writes(10), 1, None)
    with pytest.raises(FabricError, match=r"posting a message was refused: .*took 0 of 1"):
        posts.message(1, 1, 1, 1)
    with pytest.raises(FabricError, match=r"posting a receive slot was refused: ibv_post_recv took 0 of 1"):
        posts.receive(1, 1, 1, 1)


@needs_helper
@pytest.mark.parametrize(
    ("writes", "work_id", "immediate"),
    [
        (some_writes(0), 1, None),
        (some_writes(4)[::2], 1, None),
        (some_writes(4), MIDDLE, None),
        (some_writes(4), 1, 1 << 32),
    ],
)
def test_what_is_no_chain_is_refused_by_both_and_posts_nothing(
    open_null: Callable[..., NullDevice], writes: Writes, work_id: int, immediate: int | None
) -> None:
    device = open_null()
    with pytest.raises(ValueError):  # noqa: PT011 - whose words they are is not the point
        CompiledPosts(device.pair).writes(writes, work_id, immediate)
    with pytest.raises(ValueError, match=r" none"):
        check(writes, work_id, immediate)
    assert device.taken == 0


@needs_helper
def test_rows_that_are_not_there_are_refused(open_null: Callable[..., NullDevice]) -> None:
    from kvmoverd.adapters.transport.verbs import _post

    device, writes = open_null(), some_writes(4)
    for first, count in ((-1, 1), (0, 5), (4, 1), (5, 0), (1, 4), (0, 0), (1 << 62, 1)):
        with pytest.raises(ValueError, match=r"no aligned"):
            _post.writes(device.pair, writes, first, count, 1, -1)
    with pytest.raises(ValueError, match=r"none"):
        _post.writes(0, writes, 0, 4, 1, -1)
    _post.writes(device.pair, writes, 1, 2, 1, -1)
    assert (device.entries()["local"] == writes["local"][1:3]).all()

"""Purge numbers as files: who publishes them, who learns of them, and what a tenant's purge takes along."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvmoverd.adapters.storage.namespaces import publish_manifest
from kvmoverd.adapters.storage.segments.purges import Identity, Purges
from kvmoverd.core.layout import Layout
from kvmoverd.core.manifest import Manifest, Namespace


class Index:
    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}

    def set_purge(self, fingerprint16: bytes, purge: int) -> None:
        self.numbers[fingerprint16] = purge


def namespace(model: str, tenant: str = "") -> Namespace:
    layout = Layout.uniform(layers=2, tokens=4, token_bytes=64)
    return Namespace(Manifest(model, bytes(32), bytes(32), layout, "fp8", tenant=tenant))


def opened(base: Path, *, model: str = "m", tenant: str = "") -> Namespace:
    found = namespace(model, tenant)
    publish_manifest(base / found.fingerprint[:16].hex(), found, base / f"temp-{model}-{tenant}")
    return found


def test_a_purge_takes_the_next_number_and_is_known_here_at_once(tmp_path: Path) -> None:
    index, told = Index(), []
    purges = Purges(tmp_path, index, on_purge=told.append)
    space = opened(tmp_path)
    fp16 = space.fingerprint[:16]
    assert purges.look(space) == 0 == purges.number(fp16) and not told
    assert [purges.purge(space), purges.purge(space)] == [1, 2]
    assert purges.number(fp16) == 2 == index.numbers[fp16] and told == [fp16, fp16]
    assert sorted(os.listdir(tmp_path / fp16.hex())) == ["manifest.json", "purge.2"]


def test_other_nodes_learn_of_it_when_they_poll(tmp_path: Path) -> None:
    index = Index()
    here, there = Purges(tmp_path, Index()), Purges(tmp_path, index)
    space, unknown = opened(tmp_path), opened(tmp_path, model="n")
    there.look(space)
    here.purge(space)
    here.purge(unknown)
    assert not index.numbers
    assert there.poll() is False
    assert index.numbers == {space.fingerprint[:16]: 1}
    assert there.look(unknown) == 1


def test_a_poll_stops_after_its_time_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    clock = iter(number * 0.02 for number in range(100_000))
    index = Index()
    there, here = Purges(tmp_path, index, now_s=lambda: next(clock)), Purges(tmp_path, Index())
    spaces = [opened(tmp_path, model=f"m{number}") for number in range(10)]
    for space in spaces:
        there.look(space)
        here.purge(space)
    polls = 1
    while there.poll():
        polls += 1
    assert polls >= 4 and len(index.numbers) == 10


def test_many_purges_at_once_each_have_a_number_of_their_own(tmp_path: Path) -> None:
    space = opened(tmp_path)
    numbers: list[int] = []

    def run() -> None:
        purges = Purges(tmp_path, Index())
        numbers.extend(purges.purge(space) for _ in range(10))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(numbers)) == 40 and max(numbers) >= 40
    assert Purges(tmp_path, Index()).look(space) == max(numbers)


def test_a_tenants_purge_takes_its_namespaces_and_no_others(tmp_path: Path) -> None:
    index = Index()
    purges = Purges(tmp_path, index)
    ours = [opened(tmp_path, model=f"m{number}", tenant="a") for number in range(3)]
    opened(tmp_path, tenant="b")
    opened(tmp_path)
    (tmp_path / ("0" * 32)).mkdir()
    (tmp_path / "authors").mkdir()
    assert set(purges.purge_tenant("a")) == {space.fingerprint[:16] for space in ours} == set(index.numbers)
    assert purges.purge_tenant("nobody") == []


def test_a_namespace_that_was_never_opened_cannot_be_purged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Purges(tmp_path, Index()).purge(namespace("m"))


def test_whose_a_namespace_is_stands_in_its_manifest(tmp_path: Path) -> None:
    purges = Purges(tmp_path, Index())
    space = opened(tmp_path, model="m", tenant="a")
    assert purges.identity(space.fingerprint[:16]) == Identity("a", "m")
    broken = tmp_path / ("1" * 32)
    broken.mkdir()
    for content in (b"", b"[]", b"{}", b"\xff"):
        (broken / "manifest.json").write_bytes(content)
        assert purges.identity(bytes.fromhex("1" * 32)) is None

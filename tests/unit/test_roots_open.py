"""Roots are opened beside each other, in bounded time, and what comes too late is closed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from roots_kit import HeldRoot

from kvmoverd import config, devices_storage
from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage.memory import MemoryStorage
from kvmoverd.adapters.storage.roots import RootSet
from kvmoverd.adapters.storage.roots_calls import CALLS_MAX, RootCalls
from kvmoverd.adapters.storage.roots_open import Opening, open_each
from kvmoverd.core.errors import QueueFull, StorageUnusable
from kvmoverd.ports.storage import Storage, roots_of

WAIT_S = 5.0


def until_closed(storage: MemoryStorage) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not storage._closed:
        assert time.monotonic() < deadline_s, "it was not closed"
        time.sleep(0.005)


def test_each_opening_gives_its_storage_or_says_why_not() -> None:
    made = HeldRoot("good")

    def refuse() -> Storage:
        raise StorageUnusable("it is read-only")

    good, bad = open_each(
        [Opening("good", lambda: made), Opening("bad", refuse)], timeout_s=WAIT_S, stay=threading.Event()
    )
    assert good is made and isinstance(bad, StorageUnusable) and "read-only" in str(bad)
    assert made.close(0)


def test_one_that_hangs_is_given_up_and_closed_when_it_comes() -> None:
    let_go, late = threading.Event(), HeldRoot("late")

    def hang() -> Storage:
        let_go.wait(WAIT_S)
        return late

    began_s = time.monotonic()
    (found,) = open_each([Opening("late", hang)], timeout_s=0.05, stay=threading.Event())
    assert time.monotonic() - began_s < 1.0
    assert isinstance(found, StorageUnusable) and "late did not open within 0.05 s" in str(found)
    let_go.set()
    until_closed(late)


def test_openings_of_one_thread_are_made_in_it_and_it_stays() -> None:
    threads: list[threading.Thread] = []
    stay = threading.Event()

    def build() -> Storage:
        threads.append(threading.current_thread())
        return HeldRoot("root")

    found = open_each([Opening(name, build, "3fs") for name in "ab"], timeout_s=WAIT_S, stay=stay)
    assert threads[0] is threads[1] and threads[0].is_alive()
    stay.set()
    threads[0].join(WAIT_S)
    assert not threads[0].is_alive()
    assert all(isinstance(storage, MemoryStorage) and storage.close(0) for storage in found)


def test_calls_of_one_root_are_bounded_and_say_so() -> None:
    calls, let_go = RootCalls("disk"), threading.Event()
    held = [calls.begin(lambda: let_go.wait(WAIT_S), what="waiting") for _ in range(CALLS_MAX)]
    with pytest.raises(QueueFull, match=r"disk: looking: 4 calls are under way, does the filesystem hang\?"):
        calls.begin(lambda: None, what="looking")
    with pytest.raises(StorageUnusable, match="disk: waiting has not ended in time"):
        held[0].result(time.monotonic())
    let_go.set()
    assert all(call.result(time.monotonic() + WAIT_S) for call in held)


def loaded(tmp_path: Path, *roots: str) -> config.Config:
    path = tmp_path / "n.toml"
    text = "".join(f"[[storage]]\n{root}\nthreads = 1\n" for root in roots)
    path.write_text(f'node.name = "n"\npool.bytes = "8MiB"\npool.piece_bytes = "2MiB"\n{text}')
    return config.load(path, {})


@pytest.fixture
def arena() -> Arena:
    return Arena(8 << 20, 2 << 20)


def test_roots_of_the_config_become_one_set_in_their_order(tmp_path: Path, arena: Arena) -> None:
    near = 'name = "near"\nrole = "copy"\nkind = "threads"\npath = "near"\ncreate = true\nlayout = "files"'
    far = 'name = "far"\nkind = "threads"\npath = "far"\ncreate = true\nio_deadline = "3s"'
    storage = devices_storage.open_storage(loaded(tmp_path, near, far), "boot", arena)
    assert isinstance(storage, RootSet) and storage.ops_max == 128
    told = [(facts.root, facts.details["role"], facts.details["layout"]) for facts, _ in roots_of(storage)]
    assert told == [("near", "copy", "files"), ("far", "main", "segments")]
    assert [root.settings.io_deadline_s for root in storage.roots] == [10.0, 3.0]
    assert storage.close(WAIT_S)


def test_a_copy_that_cannot_be_opened_is_left_out_with_its_reason(tmp_path: Path, arena: Arena) -> None:
    near = 'name = "near"\nrole = "copy"\nkind = "threads"\npath = "missing"'
    far = 'name = "far"\nkind = "memory"'
    storage = devices_storage.open_storage(loaded(tmp_path, near, far), "boot", arena)
    (left_out, _), (main, _) = roots_of(storage)
    assert (main.root, left_out.root, left_out.io_mode) == ("far", "near", "none")
    assert left_out.details["state"] == "refused" and "missing" in str(left_out.details["why"])
    assert storage.close(WAIT_S)


def test_without_its_main_root_nothing_is_opened(tmp_path: Path, arena: Arena) -> None:
    near = 'name = "near"\nrole = "copy"\nkind = "memory"'
    far = 'name = "far"\nkind = "threads"\npath = "missing"'
    with pytest.raises(StorageUnusable, match="missing"):
        devices_storage.open_storage(loaded(tmp_path, near, far), "boot", arena)


def test_a_single_root_without_files_needs_no_set(tmp_path: Path, arena: Arena) -> None:
    storage = devices_storage.open_storage(loaded(tmp_path, 'name = "m"\nkind = "memory"'), "boot", arena)
    assert isinstance(storage, MemoryStorage) and len(roots_of(storage)) == 1
    assert storage.close(0)


def test_check_says_which_layout_a_root_has_or_would_get(tmp_path: Path, arena: Arena) -> None:
    roots = loaded(tmp_path, 'name = "far"\nkind = "threads"\npath = "far"\ncreate = true').storage
    assert devices_storage.on_this_machine(roots[0]) == {"layout here": "segments"}
    storage = devices_storage.open_storage(
        loaded(tmp_path, 'name = "far"\nkind = "threads"\npath = "far"\ncreate = true\nlayout = "files"'), "boot", arena
    )
    assert storage.close(WAIT_S)
    (tmp_path / "far" / "kvm1" / ("0" * 32)).mkdir()
    assert devices_storage.on_this_machine(roots[0]) == {"layout here": "files"}
    asked = loaded(tmp_path, 'name = "far"\nkind = "threads"\npath = "far"\nlayout = "segments"').storage[0]
    assert "holds layout 'files', not 'segments'" in devices_storage.on_this_machine(asked)["not here"]

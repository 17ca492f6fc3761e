"""Roots are opened beside each other, in bounded time, and what comes too late is closed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from roots_kit import SPACE, HeldRoot

from kvmoverd import config, devices_storage
from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage import roots_keeper
from kvmoverd.adapters.storage.answers import silent_places
from kvmoverd.adapters.storage.memory import MemoryStorage
from kvmoverd.adapters.storage.roots import RootSet
from kvmoverd.adapters.storage.roots_absent import AbsentStorage
from kvmoverd.adapters.storage.roots_calls import CALLS_MAX, RootCalls
from kvmoverd.adapters.storage.roots_keeper import RootsKeeper
from kvmoverd.adapters.storage.roots_open import Opening, begin_each
from kvmoverd.adapters.storage.roots_root import RootSettings
from kvmoverd.core.errors import QueueFull, StorageUnusable
from kvmoverd.ports.storage import Storage, StorageFacts, roots_of

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

    attempts = begin_each([Opening("good", lambda: made), Opening("bad", refuse)], stay=threading.Event())
    good, bad = (attempt.result(time.monotonic() + WAIT_S) for attempt in attempts)
    assert good is made and isinstance(bad, StorageUnusable) and "read-only" in str(bad)
    assert made.close(0)


def test_one_that_hangs_is_given_up_and_closed_when_it_comes() -> None:
    let_go, late = threading.Event(), HeldRoot("late")

    def hang() -> Storage:
        let_go.wait(WAIT_S)
        return late

    began_s = time.monotonic()
    (attempt,) = begin_each([Opening("late", hang)], stay=threading.Event())
    assert attempt.result(began_s + 0.05) is None and not attempt.ended
    assert attempt.give_up() is None
    assert time.monotonic() - began_s < 1.0
    let_go.set()
    until_closed(late)


def test_openings_of_one_thread_are_made_in_it_and_it_stays() -> None:
    threads: list[threading.Thread] = []
    stay = threading.Event()

    def build() -> Storage:
        threads.append(threading.current_thread())
        return HeldRoot("root")

    attempts = begin_each([Opening(name, build, "3fs") for name in "ab"], stay=stay)
    found = [attempt.result(time.monotonic() + WAIT_S) for attempt in attempts]
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


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots are looked after twenty times as often."""
    for name in ("PAUSE_S", "LOOK_S"):
        monkeypatch.setattr(roots_keeper, name, 0.05)


@pytest.mark.usefixtures("eager")
def test_a_copy_that_could_not_be_opened_joins_when_it_can_and_gets_blocks(tmp_path: Path, arena: Arena) -> None:
    near = 'name = "near"\nrole = "copy"\nkind = "threads"\npath = "near"\nlayout = "files"'
    far = 'name = "far"\nkind = "memory"'
    storage = devices_storage.open_storage(loaded(tmp_path, near, far), "boot", arena)
    assert isinstance(storage, RootSet)
    storage.open_namespace(SPACE)
    (tmp_path / "near").mkdir()
    until(lambda: SPACE.fingerprint in storage.roots[0].opened)
    details = storage.parts()[0][0].details
    assert details["state"] == "ok" and details["layout"] == "files"
    assert storage.close(WAIT_S)


@pytest.mark.usefixtures("eager")
def test_a_copy_that_hangs_at_the_start_holds_nobody_up_and_what_it_opens_late_is_used(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, late = threading.Event(), HeldRoot("near")
    monkeypatch.setattr(devices_storage, "OPEN_COPY_S", 0.1)
    monkeypatch.setitem(devices_storage.WITHOUT_FILES, "null", lambda name: let_go.wait(WAIT_S) and late)
    roots = 'name = "near"\nrole = "copy"\nkind = "null"', 'name = "far"\nkind = "memory"'
    began_s = time.monotonic()
    storage = devices_storage.open_storage(loaded(tmp_path, *roots), "boot", arena)
    assert time.monotonic() - began_s < 2.0 and isinstance(storage, RootSet)
    assert "near did not open within 0.1 s" in str(storage.parts()[0][0].details["why"])
    let_go.set()
    until(lambda: storage.roots[0].storage is late)
    assert storage.close(WAIT_S) and late._closed


def test_a_copy_that_comes_when_the_set_is_closed_is_closed_too(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, late = threading.Event(), HeldRoot("near")
    monkeypatch.setattr(devices_storage, "OPEN_COPY_S", 0.1)
    monkeypatch.setitem(devices_storage.WITHOUT_FILES, "null", lambda name: let_go.wait(WAIT_S) and late)
    roots = 'name = "near"\nrole = "copy"\nkind = "null"', 'name = "far"\nkind = "memory"'
    storage = devices_storage.open_storage(loaded(tmp_path, *roots), "boot", arena)
    assert storage.close(0.5), "nobody waits for it"
    let_go.set()
    until_closed(late)


def test_pauses_between_attempts_with_a_copy_grow() -> None:
    attempts: list[float] = []
    now_s = 0.0

    def refuse() -> Storage:
        attempts.append(now_s)
        raise StorageUnusable("it is read-only")

    main = HeldRoot("far")
    gone = AbsentStorage(
        Opening("near", refuse),
        StorageFacts("near", "threads", "none", "", {"role": "copy"}),
        stay=threading.Event(),
    )
    made = RootSet([(gone, RootSettings(is_main=False)), (main, RootSettings())], pool_bytes=1 << 20, keeps=False)
    made.keeper = RootsKeeper(made, made._join, now_s=lambda: now_s)
    for _ in range(200):
        made.keeper.step()
        until(lambda: gone._attempt is None or gone._attempt.ended)
        made.keeper.step()
        now_s += 1.0
    gaps = [round(b - a) for a, b in itertools.pairwise(attempts)]
    assert gaps == sorted(gaps) and gaps[0] <= 2 and gaps[-1] >= 60 and len(attempts) < 12
    assert made.close(1.0)


def test_check_says_of_a_root_that_hangs_that_it_hangs_and_of_the_others_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def silent(places: Sequence[Path], timeout_s: float) -> set[Path]:
        asked.extend(places)
        return {tmp_path / "near"}

    monkeypatch.setattr(devices_storage, "silent_places", silent)
    near = 'name = "near"\nrole = "copy"\nkind = "threads"\npath = "near"'
    far = 'name = "far"\nkind = "threads"\npath = "far"\ncreate = true'
    hung, fine = devices_storage.all_on_this_machine(loaded(tmp_path, near, far).storage)
    assert asked == [tmp_path / "near", tmp_path / "far"]
    assert "has not answered for 2 s" in hung["not here"] and "serve leaves it out" in hung["not here"]
    assert fine == {"layout here": "segments"}


def test_a_place_that_answers_with_an_error_has_answered(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert silent_places([tmp_path, tmp_path / "missing", tmp_path / "file"], WAIT_S) == set()
    assert silent_places([tmp_path], 0.0) == {tmp_path}


def test_where_no_process_can_be_started_a_thread_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path))
    assert silent_places([tmp_path, tmp_path / "missing"], WAIT_S) == set()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "no process can be started: [Errno 13] Permission denied" in lines[0]


def until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, f"still not so after {WAIT_S} s"
        time.sleep(0.005)

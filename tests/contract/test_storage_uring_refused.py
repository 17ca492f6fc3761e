"""Processes that may not do what they want: no io_uring, little locked memory, a storm of signals, no permission."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markers import needs_root, needs_setpriv
from ordeal_kit import ENGINES, LAYOUTS, undergo
from storage_ordeal import BLOCKS, NOBODY

from kvmoverd.adapters.storage.uring_probe import uring_refusal

CASES = [(layout, engine) for layout in LAYOUTS for engine in ENGINES]
each = pytest.mark.parametrize(("layout", "engine"), CASES)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
WITHOUT_IPC_LOCK = ("setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-all")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that every user may enter; pytest's own are for their owner alone."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


def assert_all_went_well(said: dict[str, Any]) -> None:
    assert said["written"] == ["OK"] * BLOCKS and set(said["read"]) == {"OK"}
    assert said["failed_ops"] == 0 and said["quiet"] and said["close_s"] < 5.0


@each_layout
@pytest.mark.parametrize(
    ("ordeal", "says"),
    [("io_uring forbidden", "Operation not permitted"), ("io_uring unknown", "Function not implemented")],
)
def test_where_io_uring_is_refused_threads_do_all_the_work_and_say_why(
    tmp_path: Path, layout: str, ordeal: str, says: str
) -> None:
    said = undergo(ordeal, layout, "uring", tmp_path)
    assert_all_went_well(said)
    assert said["kind"] == "threads" and "io_uring can't be used" in said["note"] and says in said["note"]
    again = undergo("none", layout, "uring", tmp_path)
    assert_all_went_well(again)
    assert again["kind"] == ("threads" if uring_refusal() else "uring"), "the next one may use what this one could not"


@needs_root
@needs_setpriv
@each_layout
def test_where_little_memory_may_be_locked_reads_are_plain_and_the_remedy_is_said(tmp_path: Path, layout: str) -> None:
    if uring_refusal():
        pytest.skip(f"io_uring can't be used here: {uring_refusal()}")
    said = undergo("memlock", layout, "uring", tmp_path, through=WITHOUT_IPC_LOCK)
    assert_all_went_well(said)
    assert said["kind"] == "uring" and "plain reads" in said["note"] and "ulimit -l" in said["note"]


@each
def test_a_storm_of_signals_costs_no_block(tmp_path: Path, layout: str, engine: str) -> None:
    assert_all_went_well(undergo("signals", layout, engine, tmp_path))


@needs_root
@each
def test_a_root_that_belongs_to_another_is_refused_with_the_error_and_the_place(
    open_path: Path, layout: str, engine: str
) -> None:
    root = open_path / "root"
    root.mkdir(mode=0o755)
    said = undergo("nobody", layout, engine, root)
    assert "EACCES" in said["unusable"] and str(root) in said["unusable"]
    assert list(root.iterdir()) == [], "nothing was left"


@needs_root
@each
def test_a_root_in_a_directory_that_may_not_be_entered_is_refused(open_path: Path, layout: str, engine: str) -> None:
    root = open_path / "closed" / "root"
    root.mkdir(parents=True)
    (open_path / "closed").chmod(0o700)
    said = undergo("nobody", layout, engine, root)
    assert "EACCES" in said["unusable"] and str(root) in said["unusable"]


@needs_root
@each
def test_what_one_may_no_longer_enter_is_an_error_while_it_lasts(open_path: Path, layout: str, engine: str) -> None:
    root = open_path / "root"
    root.mkdir()
    os.chown(root, NOBODY, NOBODY)
    said = undergo("no permission later", layout, engine, root)
    assert said["written"] == ["OK"] * BLOCKS and set(said["read"]) == {"OK"} and said["quiet"]
    if layout == "files":
        assert said["refused"] == ["IO_ERROR", "IO_ERROR"] and said["failed_ops"] == 2
    else:
        assert said["refused"] == ["OK", "OK"], "its segments and logs are open"

"""The decision log in a file: nothing is lost unsaid, files are moved away, and what is not whole is refused by name."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmoverd.adapters.journal_file import JournalFile, former_of
from kvmoverd.adapters.journal_reading import lines_of
from kvmoverd.core.scheduling.journal import BadJournal

STOP_S = 5.0


@contextmanager
def journal(path: Path, *, bytes_max: int = 1 << 20, queue_max: int = 1000) -> Iterator[JournalFile]:
    made = JournalFile(path, bytes_max=bytes_max, queue_max=queue_max)
    try:
        yield made
    finally:
        made.stop(STOP_S)


def test_lines_come_back_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log"
    with journal(path) as made:
        made.begin()
        for number in range(100):
            made.write(f'{{"line":{number}}}')
    assert list(lines_of(path)) == [f'{{"line":{number}}}\n' for number in range(100)]
    assert (made.numbers().lines, made.numbers().dropped, made.numbers().waiting) == (100, 0, 0)
    assert made.numbers().bytes == path.stat().st_size


def test_a_log_that_begins_moves_the_former_one_away(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for run in ("first", "second"):
        with journal(path) as made:
            made.begin()
            made.write(run)
    assert list(lines_of(path)) == ["second\n"]
    assert former_of(path).read_text() == "first\n"


def test_a_full_file_is_moved_away_and_both_are_one_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [f"{number:040}" for number in range(40)]
    with journal(path, bytes_max=1000) as made:
        made.begin()
        for line in lines:
            made.write(line)
    assert former_of(path).stat().st_size <= 1000
    assert [line.strip() for line in lines_of(path)] == lines


def test_a_log_whose_beginning_is_gone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with journal(path, bytes_max=1000) as made:
        made.begin()
        for number in range(100):
            made.write(f"{number:040}")
    with pytest.raises(
        BadJournal, match=r"log goes on where 4 files before it ended.*raise scheduler.journal.bytes_max"
    ):
        list(lines_of(path))


def test_lines_that_find_no_room_are_counted_and_missed_in_their_place(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with journal(path, queue_max=4) as made:
        made.begin()
        held = threading.Event()
        write_line, made._write_line = made._write_line, lambda line: (held.wait(STOP_S), write_line(line))[1]  # type: ignore[method-assign]
        made.write("0")
        for number in range(1, 20):
            made.write(str(number))
        dropped = made.numbers().dropped
        assert 10 < dropped < 20
        held.set()
    assert made.numbers().dropped == dropped
    lines = path.read_text().splitlines()
    assert lines[-1] == f'{{"dropped": {dropped}}}'
    assert lines[:-1] == [str(number) for number in range(20 - dropped)]
    with pytest.raises(BadJournal, match=rf"line {len(lines)}: .*dropped.*: the scheduler dropped so many lines here"):
        list(lines_of(path))


def test_a_stop_says_whether_all_was_written(tmp_path: Path) -> None:
    with journal(tmp_path / "log") as made:
        made.begin()
        made.write("all")
        assert made.stop(STOP_S)
    with journal(tmp_path / "gone" / "log") as made:
        (tmp_path / "gone" / "log").unlink()
        (tmp_path / "gone").rmdir()
        made.begin()
        made.write("none")
        assert not made.stop(STOP_S)
    assert made.numbers().dropped == 2


def test_a_disk_that_fails_ends_the_log_and_not_the_scheduler(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    with journal(path) as made:
        made.write("before any beginning")
        made.begin()
        path.unlink(missing_ok=True)
        made.write("x" * 100)
    assert made.numbers().dropped >= 1


def test_a_last_line_without_its_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"whole":1}\n{"cut')
    assert list(lines_of(path)) == ['{"whole":1}\n']


@pytest.mark.parametrize("text", ['{"continues": "x"}\n', '{"continues": -1}\n'])
def test_a_file_that_goes_on_from_nowhere_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(BadJournal, match="continues is"):
        list(lines_of(path))


def test_a_file_that_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with pytest.raises(BadJournal, match=re.escape(f"{path} can't be read: No such file")):
        list(lines_of(path))
    path.write_text('{"continues": 1}\n')
    with pytest.raises(BadJournal, match=re.escape(f"{former_of(path)} can't be read: No such file")):
        list(lines_of(path))

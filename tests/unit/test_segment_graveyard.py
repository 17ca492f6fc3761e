"""What is said again of the dead when logs that say it go: once in each log, and only of those who don't say it themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from kvmoverd.adapters.storage.block_io import choose_io
from kvmoverd.adapters.storage.segments.graveyard import Graveyard
from kvmoverd.adapters.storage.segments.usage import Usage
from kvmoverd.adapters.storage.trash import Trash
from tests.unit.segment_kit import Clock, PlainIndex


class Log:
    """What was said of whose segments."""

    def __init__(self) -> None:
        self.said: list[tuple[str, list[int]]] = []
        self.full = False

    def tombstone(self, numbers: Sequence[int], owner: str = "") -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.said.append((owner, list(numbers)))


class Grave:
    """A graveyard in which only words are buried."""

    def __init__(self, home: Path) -> None:
        (home / "trash").mkdir()
        self.log, self.dead = Log(), dict[str, Sequence[int]]()
        self.trash = Trash(home / "trash", bytes_per_s=1e9, around=home / "trash")
        self.graveyard = Graveyard(
            log=lambda: self.log,
            index=PlainIndex(),
            usage=Usage(home, choose_io(str(home / "trial"), direct=True)),
            trash=self.trash,
            files_drop=lambda author, numbers: consume(numbers),
            told_dead=lambda: self.dead,
            grace_s=1.0,
            now_ns=Clock(),
        )


def consume(numbers: Iterable[int]) -> None:
    assert not list(numbers), "no segment is buried here"


@pytest.fixture
def grave(tmp_path: Path) -> Iterator[Grave]:
    grave = Grave(tmp_path)
    yield grave
    grave.trash.close()


def test_each_dead_segment_is_said_again_once_however_many_authors_leave(grave: Grave) -> None:
    grave.dead = {"a.1": [1, 2], "a.2": [7], "a.3": [5]}
    grave.graveyard.repeat(["a.3"])
    grave.dead = {"a.1": [1, 2, 3], "a.2": [7]}
    grave.graveyard.repeat(["a.4"])
    grave.graveyard.repeat(["a.5"])
    assert grave.log.said == [("a.1", [1, 2]), ("a.2", [7]), ("a.1", [3])]


def test_what_could_not_be_said_is_said_at_the_next_leave(grave: Grave) -> None:
    grave.dead = {"a.1": [1]}
    grave.log.full = True
    with pytest.raises(OSError, match="No space"):
        grave.graveyard.repeat(["a.2"])
    grave.log.full = False
    grave.graveyard.repeat(["a.2"])
    assert grave.log.said == [("a.1", [1])]


def test_a_fresh_log_of_another_author_has_to_say_all_anew(grave: Grave) -> None:
    grave.dead = {"a.1": [1]}
    grave.graveyard.repeat(["a.2"])
    grave.log = Log()
    grave.graveyard.repeat(["a.3"])
    assert grave.log.said == [("a.1", [1])]

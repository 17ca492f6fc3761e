"""What a check of a store came to: numbers by fixed names, and problems in words."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

PROBLEMS_MAX = 1000


@dataclass(slots=True)
class FsckReport:
    """`blocks`: different ones that can be found by a daemon; `copies`: further records of the same blocks.

    `bytes`: of all records that were read. `corrupt`: records that are not whole and right, those of missing segments among
    them; `unreadable`: those that the device refused to give, of which nothing is known. `repaired`: corrupt ones that nobody
    finds any more. `known_bad`: records that were reported before. `unnamed`: whole records of authors who are dead that no
    log names; `published`: those of them that are found from now on. `damaged_pages`: of index logs. `missing_segments`: that
    logs name. `bad_segments`: whose first page is damaged. `unknown_files`: that are no part of a store.
    """

    path: str
    layout: str
    blocks: int = 0
    copies: int = 0
    bytes: int = 0
    corrupt: int = 0
    repaired: int = 0
    unreadable: int = 0
    known_bad: int = 0
    unnamed: int = 0
    published: int = 0
    damaged_pages: int = 0
    unread_logs: int = 0
    missing_segments: int = 0
    bad_segments: int = 0
    wrong_manifests: int = 0
    unknown_files: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    problems_left_out: int = 0

    @property
    def is_fine(self) -> bool:
        """Nothing is left that a daemon would stumble over."""
        return self.corrupt == self.repaired and not (self.unreadable or self.wrong_manifests)

    def problem(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)
        else:
            self.problems_left_out += 1

    def plain(self) -> dict[str, object]:
        return dataclasses.asdict(self)

"""Takes over the directories of dead authors, so that their segments are collected: one owner for each at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvmoverd.adapters.storage.block_io import DISK_FULL
from kvmoverd.adapters.storage.segments.claims import Claim, bid, highest
from kvmoverd.adapters.storage.segments.followed import FSCK_NODE, node_of
from kvmoverd.adapters.storage.segments.leases import Life
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.settings import SegmentSettings

PERIOD_S = 1.0
_ADOPTED_AT_ONCE = 16
_SPREAD = 0.25
"""Nodes bid for what another left behind up to so many times `dead_s` later: not all at the same moment."""


class Lives(Protocol):
    """What is known of the authors of the root."""

    def known(self) -> list[str]: ...

    def life(self, author: str) -> Life | None: ...

    def silent_s(self, author: str) -> float: ...


@dataclass(slots=True)
class AdoptionStats:
    """`owned`: directories that are ours now; the rest are totals since start."""

    owned: int = 0
    adopted: int = 0
    outbid: int = 0
    lost: int = 0
    gone: int = 0
    failures: int = 0


class Adoption:
    """`step` is the keeper's job, once a second; `owned` is for any thread. `own`: the author that this process writes as.

    Former starts of this node are adopted as soon as they are known to be dead, others after `dead_s` of silence. Whoever
    revives sees the claim and leaves the directory alone. A claim whose claimant is dead, or that does not say whose it is for
    `dead_s`, is outbid. What two owners would do to one directory, each while he thinks that it is his, does no harm: they
    delete what is dead already, each says so in his own log, and a directory goes only when no segment is left in it.
    """

    def __init__(
        self,
        authors: Path,
        lives: Lives,
        *,
        own: Callable[[], str],
        settings: SegmentSettings,
        now_ns: Callable[[], int],
        direct: bool = True,
        on_adopted: Callable[[str], None] = lambda author: None,
        on_lost: Callable[[str], None] = lambda author: None,
    ) -> None:
        self._authors, self._lives, self._own, self._now_ns = authors, lives, own, now_ns
        self._files = PageFiles(direct=direct, pages_max=1)
        self._dead_s, self._dead_ns = settings.dead_s, round(settings.dead_s * 1e9)
        self._look_again_ns = round(settings.heartbeat_s * 1e9)
        self.on_adopted, self.on_lost = on_adopted, on_lost
        self._owned: dict[str, int] = {}
        """The number of our claim; negative: the number that it will have when there is room for it."""
        self._seen: set[str] = set()
        self._claimed: set[str] = set()
        self._unsigned: dict[tuple[str, int], int] = {}
        self._looked_ns: dict[str, int] = {}
        self._stats = AdoptionStats()

    def step(self) -> bool:
        """Looks at the dead whose turn it is; True when there are more than were adopted at once."""
        known = self._lives.known()
        self._forget(set(known))
        adopted = 0
        for author in known:
            if node_of(author) == FSCK_NODE:
                continue
            try:
                if self._is_left(author) and self._due(author):
                    adopted += self._look(author)
            except FileNotFoundError:
                self._lose(author, gone=True)
            except OSError:
                self._stats.failures += 1
            if adopted >= _ADOPTED_AT_ONCE:
                return True
        return False

    def owned(self) -> list[str]:
        """Adopted authors, as of the last look at each; the own one is not among them."""
        return list(self._owned)

    def accountable(self) -> list[str]:
        """Authors whose bytes count as this node's: its own, its former starts, and what any of these had adopted.

        Whether they are adopted already or not: they will be. Of one that can't be looked at only the name counts.
        """
        found = [self._own()]
        for author in self._lives.known():
            try:
                claim = highest(self._authors / author, self._files)
            except FileNotFoundError:
                continue
            except OSError:
                claim = None
            owner = claim.claimant if claim and claim.claimant else author
            if self._is_of_this_node(owner):
                found.append(author)
        return found

    def stats(self) -> AdoptionStats:
        self._stats.owned = len(self._owned)
        return self._stats

    def _is_left(self, author: str) -> bool:
        """Dead, or claimed by somebody once: then its author leaves it alone for good, and nobody need wait again."""
        if author not in self._seen:
            claim = highest(self._authors / author, self._files)
            self._seen.add(author)
            if claim is not None:
                self._claimed.add(author)
        return author in self._claimed or self._lives.life(author) in (Life.DEAD, Life.ENDED)

    def _due(self, author: str) -> bool:
        """A directory that was looked at needs no other look for a heartbeat, unless its claim may be void soon."""
        now_ns = self._now_ns()
        if now_ns < self._looked_ns.get(author, 0):
            return False
        self._looked_ns[author] = now_ns + self._look_again_ns
        return True

    def _look(self, author: str) -> bool:
        """True when it was adopted now."""
        directory = self._authors / author
        claim = highest(directory, self._files)
        if claim is not None and claim.claimant == self._own():
            return self._take(author, claim.number)
        number = claim.number + 1 if claim else 1
        if self._owned.get(author, -number) != -number:
            self._lose(author, gone=False)
        if not self._may_bid(author, claim):
            return False
        try:
            made = bid(directory, number, self._own())
        except OSError as error:
            if error.errno not in DISK_FULL or not self._is_of_this_node(author):
                raise
            # A full disk has no room for a claim, and must be freed by somebody: ours until others claim it.
            return self._take(author, -number)
        if not made:
            # Somebody was faster: the next look tells who.
            self._looked_ns.pop(author, None)
            return False
        # Only a look after the bid shows whether a higher one was there meanwhile.
        found = highest(directory, self._files)
        self._stats.outbid += claim is not None
        return found is not None and found.claimant == self._own() and self._take(author, found.number)

    def _take(self, author: str, number: int) -> bool:
        known = self._owned.get(author)
        self._owned[author] = number
        if known is not None:
            if known < 0 < number:
                # What was found in it could be said to nobody: it is looked through once more.
                self.on_adopted(author)
            return False
        self._stats.adopted += 1
        self.on_adopted(author)
        return True

    def _lose(self, author: str, *, gone: bool) -> None:
        if self._owned.pop(author, None) is not None:
            self._stats.gone += gone
            self._stats.lost += not gone
            self.on_lost(author)

    def _may_bid(self, author: str, claim: Claim | None) -> bool:
        if claim is None:
            return self._may_follow_on(author, author)
        if not claim.claimant:
            began_ns = self._unsigned.setdefault((author, claim.number), self._now_ns())
            return self._now_ns() - began_ns >= self._dead_ns
        return self._is_dead(claim.claimant) and self._may_follow_on(author, claim.claimant)

    def _is_dead(self, claimant: str) -> bool:
        """A claimant without a directory has nothing left that could be his."""
        if self._is_former_name(claimant):
            return True
        life = self._lives.life(claimant)
        if life is None:
            return not (self._authors / claimant).exists()
        return life is not Life.LIVE

    def _may_follow_on(self, author: str, last: str) -> bool:
        """`last`: who owned it; his own node goes first."""
        if self._is_of_this_node(last) or self._is_of_this_node(author):
            return True
        silent_s = self._lives.silent_s(author)
        return silent_s >= self._dead_s * (1 + _SPREAD * self._rank(author))

    def _rank(self, author: str) -> float:
        """From 0 to 1, another for each node and author."""
        digest = hashlib.blake2b(f"{node_of(self._own())}/{author}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") / (1 << 32)

    def _is_of_this_node(self, author: str) -> bool:
        return node_of(author) == node_of(self._own())

    def _is_former_name(self, author: str) -> bool:
        """A name that this very process wrote under, until it was taken for dead."""
        return author != self._own() and _start_of(author) == _start_of(self._own())

    def _forget(self, known: set[str]) -> None:
        for author in [author for author in self._owned if author not in known]:
            self._lose(author, gone=True)
        self._seen &= known
        self._claimed &= known
        self._looked_ns = {author: at for author, at in self._looked_ns.items() if author in known}
        self._unsigned = {name: at for name, at in self._unsigned.items() if name[0] in known}


def _start_of(author: str) -> str:
    """The name without the number that a start goes on under when it was taken for dead.

    >>> _start_of("rack-1.node-7.0123abcd-2"), _start_of("rack-1.node-7.0123abcd")
    ('rack-1.node-7.0123abcd', 'rack-1.node-7.0123abcd')
    """
    node, _, boot = author.rpartition(".")
    return f"{node}.{boot.partition('-')[0]}"

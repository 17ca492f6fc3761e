"""Authors of this node's name that are none of its own starts: two daemons were given one name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from kvmoverd.adapters.storage.segments.followed import Followed, node_of

log = logging.getLogger(__name__)


class Namesakes:
    """`look` is for one thread, `note` for any. `own`: the author that this process writes as."""

    def __init__(self, own: Callable[[], str]) -> None:
        self._own = own
        self._living: tuple[str, ...] = ()
        self._told: set[str] = set()

    def look(self, followed: Collection[Followed]) -> None:
        """Finds those who are seen to live; each is one warning, however often it comes and goes."""
        node, boot_id = node_of(self._own()), boot_of(self._own())
        self._living = tuple(
            sorted(
                {
                    boot_of(author.name)
                    for author in followed
                    if author.node == node and author.lease.is_seen_alive and boot_of(author.name) != boot_id
                }
            )
        )
        if new := set(self._living) - self._told:
            self._told |= new
            log.warning("%s", self.note())

    def note(self) -> str:
        """Empty when there is none."""
        if not self._living:
            return ""
        boots = ", ".join(self._living)
        return (
            f"another daemon writes here as node {node_of(self._own())} (boot id {boots}): give each its own node.name"
        )


def boot_of(author: str) -> str:
    """
    >>> boot_of("rack-1.node-7.0123abcd-2")
    '0123abcd'
    """
    return author.rpartition(".")[2].partition("-")[0]

"""What outlives the queue pairs of links that others hold here: newest generations, and the frames that were told lately.

A frame may be repeated over another link than the one that it was applied through, so who looks for it looks at all links of
its sender. Each link remembers its own: one that is busy does not push out what another one, now broken, has told.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvmoverd.adapters.transport.verbs.link import WINDOW_FRAMES
from kvmoverd.ports.transport import Sender

TOLD_MAX = 4 * WINDOW_FRAMES
"""Frames that a link remembers as applied: more than can have lost their word when it breaks."""
PASTS_MAX = 1 << 16
"""Links that are remembered, of all senders together."""


@dataclass(slots=True)
class LinkPast:
    """Of one link: its newest generation, and the sequences that were told through it."""

    generation: int = 0
    told: deque[int] = field(default_factory=lambda: deque(maxlen=TOLD_MAX))


class Pasts:
    """Called in the engine's thread. Sequences are unique within a sender, which is one boot of a node."""

    def __init__(self, links_max: int = PASTS_MAX) -> None:
        self._senders: OrderedDict[Sender, OrderedDict[int, LinkPast]] = OrderedDict()
        self._links_max = links_max
        self._links = 0

    def generation(self, sender: Sender, link_id: int) -> int | None:
        """None: that link is not known."""
        links = self._senders.get(sender)
        past = links.get(link_id) if links is not None else None
        return None if past is None else past.generation

    def begin(self, sender: Sender, link_id: int, generation: int) -> LinkPast:
        """The link's past, which goes on under a new generation. The one that began longest ago may be forgotten."""
        links = self._senders.setdefault(sender, OrderedDict())
        self._senders.move_to_end(sender)
        past = links.get(link_id)
        if past is None:
            past = links[link_id] = LinkPast()
            self._links += 1
        links.move_to_end(link_id)
        past.generation = generation
        while self._links > self._links_max:
            self._forget_one()
        return past

    def told(self, sender: Sender, sequence: int) -> bool:
        """Was this frame applied and told lately, over whatever link?"""
        links = self._senders.get(sender)
        return links is not None and any(sequence in past.told for past in links.values())

    def drop(self, sender: Sender) -> None:
        self._links -= len(self._senders.pop(sender, ()))

    def _forget_one(self) -> None:
        oldest = next(iter(self._senders))
        self._senders[oldest].popitem(last=False)
        self._links -= 1
        if not self._senders[oldest]:
            del self._senders[oldest]

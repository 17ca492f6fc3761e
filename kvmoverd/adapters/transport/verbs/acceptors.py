"""All links that others hold here: which offers are taken, and when those of a dead node are fenced."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial

from kvmoverd.adapters.transport.verbs.claims import Claims
from kvmoverd.adapters.transport.verbs.end import GRANTER, SLOTS_MIN, LinkBroken, LinkEnd
from kvmoverd.adapters.transport.verbs.engine import Engine
from kvmoverd.adapters.transport.verbs.fabric import FabricError
from kvmoverd.adapters.transport.verbs.incoming import IncomingLink, LinkName
from kvmoverd.adapters.transport.verbs.link import LinkSettings, compare_with_peer
from kvmoverd.adapters.transport.verbs.messages import ASK_BYTES, GRANT_BYTES, PROTOCOL
from kvmoverd.adapters.transport.verbs.pasts import Pasts
from kvmoverd.core.errors import BadRequest, KvmoverError, PeerUnreachable, PoolExhausted, TransportMismatch
from kvmoverd.core.qos import KvClass, Marks
from kvmoverd.ports.connection import Answer, Answered, Offer
from kvmoverd.ports.transport import Sender

PEER_CNICS_MAX = 64
"""As many as a node may have. Each link has some 270 KB of locked memory, whether or not it is used."""


class Acceptors:
    """Called in the engine's thread. Implements `Siblings` for its links."""

    def __init__(self, engine: Engine, claims: Claims, settings: LinkSettings, marks: Mapping[KvClass, Marks]) -> None:
        self.fences = 0
        self._engine = engine
        self._claims = claims
        self._settings = settings
        self._marks = marks
        self._links: dict[LinkName, IncomingLink] = {}
        self._pasts = Pasts()

    def accept(self, sender: Sender, offer: Offer, answered: Answered, now_s: float) -> None:
        """Answers once. The link's former queue pair is destroyed before, so nothing late lands behind what comes anew."""
        try:
            self._begin(sender, offer, answered, now_s)
        except Exception as error:  # noqa: BLE001 - one offer that can't be taken must not end the links of all others
            told = error if isinstance(error, KvmoverError) else PeerUnreachable(f"the offer failed: {error!r}")
            with contextlib.suppress(Exception):
                # Who asked may be gone.
                answered(told)

    def forgot(self, now_s: float) -> None:
        """A sink was: whoever may write it must let go."""
        for link in self._links.values():
            if link.open_frames:
                link.revoke_forgotten(now_s)

    def peer_gone(self, sender: Sender, now_s: float) -> None:
        for (whose, _), link in list(self._links.items()):
            if whose == sender:
                link.fence(now_s)
        self._pasts.drop(sender)

    def close(self, now_s: float) -> None:
        for link in list(self._links.values()):
            link.fence(now_s)

    @property
    def links(self) -> int:
        return len(self._links)

    # Siblings

    def gone(self, link: IncomingLink, *, fenced: bool) -> None:
        self.fences += fenced
        if self._links.get(link.name) is link:
            del self._links[link.name]

    def told(self, sender: Sender, sequence: int) -> bool:
        return self._pasts.told(sender, sequence)

    def take_over(self, link: IncomingLink, sequence: int, now_s: float) -> None:
        """Its sender has destroyed its own end of the other link; what is on its way through it lands before, or never."""
        for other in list(self._links.values()):
            if other is not link and other.name[0] == link.name[0] and other.has_open(sequence):
                other.fence(now_s, "its frames come over another link")
                if other.has_open(sequence):
                    raise LinkBroken(f"frame {sequence} is open on another link, which can't be destroyed yet")

    def _begin(self, sender: Sender, offer: Offer, answered: Answered, now_s: float) -> None:
        """Raises what the other node is told."""
        self._check(sender, offer)
        name = (sender, offer.link_id)
        former = self._links.get(name)
        if former is not None:
            former.fence(now_s)
        if name in self._links:
            raise PeerUnreachable(f"the former queue pair of link {offer.link_id:#x} can't be destroyed yet")
        self._open(name, offer, answered, now_s)

    def _check(self, sender: Sender, offer: Offer) -> None:
        """Raises what the other node is told."""
        if offer.protocol != PROTOCOL:
            raise TransportMismatch(f"links of protocol {offer.protocol} are offered, this node speaks {PROTOCOL}")
        if not 0 <= offer.peer_cnic < len(self._engine.fabrics):
            raise BadRequest(f"CNIC {offer.peer_cnic} is asked for, there are {len(self._engine.fabrics)}")
        if offer.receive_slots < SLOTS_MIN or offer.message_bytes < GRANT_BYTES:
            raise BadRequest(
                f"{offer.receive_slots} slots of {offer.message_bytes} bytes, {SLOTS_MIN} of {GRANT_BYTES} are the least"
            )
        known = self._pasts.generation(sender, offer.link_id)
        if known is not None and offer.generation <= known:
            raise BadRequest(f"generation {offer.generation} of link {offer.link_id:#x}, generation {known} is known")
        if (sender, offer.link_id) not in self._links:
            self._check_room(sender)

    def _check_room(self, sender: Sender) -> None:
        """One node may have a link of each class between any two CNICs, and half of all queue pairs. Raises `PoolExhausted`."""
        ends_max = self._engine.ends_max
        needed = len(KvClass) * len(self._engine.fabrics) * PEER_CNICS_MAX
        share = min(needed, max(len(KvClass), ends_max // 2))
        free = min(ends_max - self._engine.ends, share - sum(name[0] == sender for name in self._links))
        if free < 1:
            raise PoolExhausted(purpose="transport.verbs.qps_max", asked=1, free=max(free, 0), unit="queue pairs")

    def _open(self, name: LinkName, offer: Offer, answered: Answered, now_s: float) -> None:
        """The answer follows when the end is connected, or fenced before. Raises what the other node is told."""
        past = self._pasts.begin(*name, offer.generation)
        cnic, marks = offer.peer_cnic, self._marks[offer.kv_class]
        compare_with_peer(name[0][0], offer.kv_class, marks, offer.marks)
        end: LinkEnd[object] | None = None
        try:
            end = self._engine.make_end(cnic, GRANTER)
            end.prepare(offer.receive_slots)
        except FabricError as error:
            if end is not None:
                self._engine.bury(cnic, end, now_s, lambda now_s: None)
            raise PeerUnreachable(f"no queue pair on CNIC {cnic}: {error}") from error
        link = IncomingLink(name, cnic, end, past, self._claims, self._engine, self._settings, self, answered, now_s)
        self._engine.enlist(cnic, end, link)
        self._engine.stir(link)
        self._links[name] = link
        answer = Answer(end.path, marks, GRANTER.receive_slots, ASK_BYTES)
        self._engine.connect(end, offer.end, marks, partial(self._connected, link, answer))

    def _connected(self, link: IncomingLink, answer: Answer, error: FabricError | None, now_s: float) -> None:
        if error is not None:
            link.fence(now_s, f"no queue pair on CNIC {link.cnic}: {error}")
        link.opened(answer)

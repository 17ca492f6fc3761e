"""Asks against the sinks of this process: what may be written over which CNIC, and what an ask is answered."""

from __future__ import annotations

from dataclasses import dataclass

from kvmoverd.adapters.transport.frames import SLICES_MAX, Status
from kvmoverd.adapters.transport.sinks import Claim, FrameRefused, Sinks
from kvmoverd.adapters.transport.verbs.book import Book
from kvmoverd.adapters.transport.verbs.chain import places_of
from kvmoverd.adapters.transport.verbs.messages import Applied, Ask, OtherCnic, Places, Refused
from kvmoverd.ports.transport import Sender


@dataclass(frozen=True, slots=True)
class Granted:
    """Until `Claims.end` or `Claims.drop` the sink has a writer, and nobody else gets the layer."""

    claim: Claim
    places: Places

    @property
    def forgotten(self) -> bool:
        return self.claim.opened.forgotten


class Claims:
    """Never raises: whatever an ask meets is an answer to it."""

    def __init__(self, sinks: Sinks, book: Book) -> None:
        self._sinks = sinks
        self._book = book

    def enter(self, sender: Sender | None, cnic: int, ask: Ask) -> Granted | Applied | Refused | OtherCnic:
        """What `sender` (None: this process) is told; a layer without a byte is applied at once."""
        try:
            claim = self._sinks.begin(sender, ask.sink_id, ask.layer, ask.first_block, ask.payload_bytes)
        except Exception as error:  # noqa: BLE001 - whatever `resolve` did: the ask ends, and says so
            return _refusal(ask.sequence, error)
        try:
            found = self._granted(claim, cnic, ask)
        except Exception as error:  # noqa: BLE001 - memory that is not registered, or a sink that was just forgotten
            self._sinks.give_up(claim)
            return _refusal(ask.sequence, error)
        if isinstance(found, OtherCnic):
            self._sinks.give_up(claim)
        return found

    def end(self, granted: Granted, sequence: int) -> Applied | Refused:
        """All bytes are in their places and nothing is on its way: it is told, unless the sink was forgotten."""
        try:
            self._sinks.complete(granted.claim)
        except FrameRefused as error:
            self.drop(granted)
            return _refusal(sequence, error)
        self._sinks.let_go(granted.claim)
        return Applied(sequence)

    def drop(self, granted: Granted) -> None:
        """Nothing is on its way any more, and not all came: the layer is free for another try."""
        self._sinks.give_up(granted.claim)
        self._sinks.let_go(granted.claim)

    def _granted(self, claim: Claim, cnic: int, ask: Ask) -> Granted | Applied | OtherCnic:
        slices = claim.destination.slices
        nearer = self._book.preferred(slices)
        if not ask.settled and nearer not in (cnic, -1):
            return OtherCnic(ask.sequence, nearer)
        if not ask.payload_bytes:
            self._sinks.complete(claim)
            return Applied(ask.sequence)
        places = places_of(*self._book.keyed(cnic, slices))
        if len(places) > SLICES_MAX:
            raise FrameRefused(
                Status.FAILED, f"layer {ask.layer} lies in {len(places)} places, at most {SLICES_MAX} go"
            )
        found = Granted(claim, places)
        self._sinks.hold(claim)
        return found


def _refusal(sequence: int, error: Exception) -> Refused:
    if isinstance(error, FrameRefused):
        return Refused(sequence, error.status, error.detail, str(error))
    return Refused(sequence, Status.FAILED, 0, f"{type(error).__name__}: {error}")

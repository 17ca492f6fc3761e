"""Offers and answers between two processes of a test, over a pair of pipes: a line each, in one direction at a time."""

from __future__ import annotations

import base64
import itertools
import pickle
import threading
from typing import IO, Any

from kvmoverd.adapters.transport.verbs.transport import VerbsTransport
from kvmoverd.ports.connection import Answered, Offer
from kvmoverd.ports.transport import Route, Sender


class Words:
    """A `Dial` to the process at the other end, which is `sender`; its offers go to the transport here."""

    def __init__(self, source: IO[bytes], target: IO[bytes], transport: VerbsTransport, sender: Sender) -> None:
        self._source = source
        self._target = target
        self._transport = transport
        self._sender = sender
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, Answered] = {}
        self.said: list[Any] = []
        transport.dial_with(self.dial)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def dial(self, route: Route, offer: Offer, answered: Answered) -> None:
        number = next(self._numbers)
        self._asked[number] = answered
        self.tell("offer", number, offer)

    def tell(self, *what: Any) -> None:
        """The other process may be dead."""
        with self._lock:
            try:
                self._target.write(base64.b64encode(pickle.dumps(what)) + b"\n")
                self._target.flush()
            except (BrokenPipeError, ValueError):
                return

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _read(self) -> None:
        for line in self._source:
            kind, *rest = pickle.loads(base64.b64decode(line))
            match kind:
                case "offer":
                    number, offer = rest
                    self._transport.accept(
                        self._sender, offer, lambda answer, number=number: self.tell("answer", number, answer)
                    )
                case "answer":
                    number, answer = rest
                    self._asked.pop(number)(answer)
                case _:
                    self.said.append((kind, *rest))

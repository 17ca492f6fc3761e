"""A node in a process of its own, on rxe0: `sends|receives size_bytes layers pieces`. Lives until its stdin closes."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
from transport_kit import SENDER, End, noise, scattered
from verbs_pair import Desk, rxe_node
from verbs_words import Words

from kvmoverd.ports.transport import Route, Sink

LIFETIME_S = 100.0
RECEIVER = ("b", "boot-2")


def main() -> None:
    role, size_bytes, layers, pieces = sys.argv[1], *map(int, sys.argv[2:5])
    rng = np.random.default_rng(int(sys.argv[5]))
    sends = role == "sends"
    transport = rxe_node("rxe0", Desk(), SENDER if sends else RECEIVER)
    out = os.fdopen(os.dup(1), "wb")
    words = Words(sys.stdin.buffer, out, transport, RECEIVER if sends else SENDER)
    end = End(transport)
    memory = noise(rng, size_bytes)
    slices = scattered(memory, rng, pieces)
    if sends:
        route = Route(*RECEIVER, "verbs:1", b"k" * 32)
        ops = [end.send(route, 1, layer, slices) for layer in range(layers)]
        kept = end.send(route, 2, 0, slices)
        words.tell("ready")
        for op_id in [*ops, kept]:
            words.tell("ended", end.sent(op_id, LIFETIME_S).reason.name)
    else:
        transport.expect(Sink(1, lambda layer, first_block: slices, SENDER))
        words.tell("ready")
    threading.Event().wait(LIFETIME_S) if sends else words.join(LIFETIME_S)
    transport.close(5.0)


main()

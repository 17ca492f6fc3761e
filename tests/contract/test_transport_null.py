"""The null transport: what it reads though it moves nothing, and that the loop is never kept long."""

from __future__ import annotations

import numpy as np
from transport_kit import End, cut, noise, untouched

from kvmoverd.adapters.transport.null import SENDS_PER_POLL, NullTransport
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Received, Send, Sent


def test_every_offset_of_both_sides_is_read() -> None:
    transport, rng = NullTransport(), np.random.default_rng(1)
    end = End(transport, None, copies=False)
    source, destination = cut(noise(rng, 900), rng, 40), cut(untouched(900), rng, 30)
    end.expect(1, lambda layer, first_block: destination)
    assert end.sent(end.send(None, 1, 0, source)).moved_bytes == 900
    assert transport.offsets_sum == sum(sum(row) for rows in (source, destination) for row in rows.tolist())
    assert transport.close(0.0)


def test_a_poll_does_a_few_sends_and_leaves_the_descriptor_readable_for_the_rest() -> None:
    end, rng = End(NullTransport(), None, copies=False), np.random.default_rng(1)
    source = cut(noise(rng, 900), rng, 40)
    end.expect(1, lambda layer, first_block: source)
    end.transport.submit([Send(layer, None, 1, layer, 0, source) for layer in range(3 * SENDS_PER_POLL)])
    end.pump(0)
    assert len(end.of(Sent)) == SENDS_PER_POLL
    end.wait(Sent, 3 * SENDS_PER_POLL)
    assert [event.layer for event in end.of(Received)] == list(range(3 * SENDS_PER_POLL))
    assert end.transport.close(0.0)


def test_what_is_beyond_the_queue_is_refused_at_once() -> None:
    end, rng = End(NullTransport(queue_max=2), None, copies=False), np.random.default_rng(1)
    source = cut(noise(rng, 90), rng, 4)
    end.expect(1, lambda layer, first_block: source)
    end.transport.submit([Send(layer, None, 1, layer, 0, source) for layer in range(3)])
    assert [end.sent(op_id).reason for op_id in range(3)] == [Reason.OK, Reason.OK, Reason.POOL_EXHAUSTED]
    assert "transport.queue_max is 2" in end.sent(2).message
    assert end.transport.close(0.0)

"""A layer on its way out: what was granted for it, what is posted of it, and how it ends."""

from __future__ import annotations

from collections import deque

import numpy as np

from kvmoverd.adapters.transport.frames import U32_MAX
from kvmoverd.adapters.transport.verbs.book import Book
from kvmoverd.adapters.transport.verbs.chain import Chain, writes_between
from kvmoverd.adapters.transport.verbs.end import POSTED_BYTES_MAX, LinkBroken, LinkEnd
from kvmoverd.adapters.transport.verbs.messages import Ask, Grant, Places
from kvmoverd.adapters.transport.verbs.pairs import Pair
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Send

Verdict = tuple[Reason, str]


class Frame:
    """A send, and where it stands on its link. `sequence`: no other frame of this process ever has it.

    `again`: it was asked for on an earlier queue pair, and may have been applied. `settled`: its CNICs were told, or are what
    is left. `tried`: pairs of CNICs that failed under it.
    """

    def __init__(self, send: Send, sequence: int) -> None:
        self.send = send
        self.sequence = sequence
        self.payload_bytes = int(send.source[:, 1].sum())
        self.again = self.settled = False
        self.breaks = 0
        self.tried: list[Pair] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        """It has no link: nothing of it is granted or posted."""
        self.chain: Chain | None = None
        self.on_way = 0
        self.abandoned = False
        self.verdict: Verdict | None = None
        self.fault = ""
        self.progress_s = 0.0
        self._granted: list[Places] = []
        self._granted_rows = 0

    @property
    def ask(self) -> Ask:
        send = self.send
        return Ask(
            self.sequence, send.sink_id, send.layer, send.first_block, self.payload_bytes, self.again, self.settled
        )

    @property
    def written(self) -> bool:
        """All of it is posted, its immediate too."""
        return self.chain is not None and not self.chain.left and not self.abandoned

    @property
    def over(self) -> bool:
        return self.verdict is not None and not self.on_way

    def grant(self, grant: Grant, cnic: int, book: Book) -> None:
        """`chain` is there when all places are. Raises `LinkBroken` for places that can't be those of this frame.

        Raises `NotRegistered` for a source that this CNIC can't read.
        """
        if self.chain is not None or grant.first != self._granted_rows:
            raise LinkBroken(
                f"places {grant.first} on were granted for layer {self.send.layer}, {self._granted_rows} are known"
            )
        self._granted.append(grant.places)
        self._granted_rows += len(grant.places)
        if self._granted_rows < grant.total:
            return
        places = np.concatenate(self._granted)
        self._granted.clear()
        granted_bytes = int(places["size_bytes"].astype(np.int64).sum())
        if granted_bytes != self.payload_bytes:
            raise LinkBroken(f"{granted_bytes} bytes were granted for a layer of {self.payload_bytes}")
        self.chain = Chain(writes_between(*book.keyed(cnic, self.send.source), places))

    def abandon(self) -> None:
        """Nothing more of it is posted."""
        self.abandoned = True
        if self.chain is not None:
            self.chain.stop()


def post_some(end: LinkEnd[Frame], frames: deque[Frame], *, tell: bool) -> bool:
    """Posts what the end takes, frame after frame; those that are wholly posted leave the queue. True when anything went.

    `tell`: with the last part of a frame goes its immediate. Raises `FabricError`.
    """
    posted = False
    while frames:
        frame = frames[0]
        assert frame.chain is not None, f"frame {frame.sequence} is written before it is granted"
        rows = frame.chain.fitting(end.rows_free, POSTED_BYTES_MAX - end.posted_bytes)
        last = rows == frame.chain.left
        if not rows or (last and tell and not end.may_tell):
            return posted
        part, size_bytes = frame.chain.take(rows)
        end.post_chain(part, size_bytes, frame, frame.sequence & U32_MAX if last and tell else None)
        frame.on_way += 1
        posted = True
        if last:
            frames.popleft()
    return posted

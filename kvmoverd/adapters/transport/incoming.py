"""The receiving end of one connection: a thread that reads frames, applies them to sinks and answers each."""

from __future__ import annotations

import errno
import socket

import numpy as np

from kvmoverd.adapters.memory.iovec import SLICE_ROW_BYTES, Cursor, pull_step
from kvmoverd.adapters.transport.events import Events
from kvmoverd.adapters.transport.frames import (
    FRAME_BYTES,
    PREFACE_BYTES,
    Ack,
    BodyKind,
    Frame,
    FrameError,
    Preface,
    Status,
)
from kvmoverd.adapters.transport.link import Peers
from kvmoverd.adapters.transport.medium import ChannelSettings, CheckKey
from kvmoverd.adapters.transport.sinks import Claim, FrameRefused, Sinks
from kvmoverd.adapters.transport.wire import ChannelLost, Stopped, Wire
from kvmoverd.ports.transport import IoVec, RouteLost, Sender

PREFACE_WAIT_S = 5.0
"""Who connects must say who it is within this time, or `io_timeout_s` if that is shorter."""


class Incoming:
    """`peer_pid`: the process that frames by address are pulled from, told by the kernel, never by the wire."""

    def __init__(
        self,
        sock: socket.socket,
        kind: BodyKind,
        peer_pid: int,
        settings: ChannelSettings,
        sinks: Sinks,
        events: Events,
        check_key: CheckKey,
        peers: Peers,
    ) -> None:
        self._sock = sock
        self._kind = kind
        self._peer_pid = peer_pid
        self._settings = settings
        self._sinks = sinks
        self._events = events
        self._check_key = check_key
        self._peers = peers

    def run(self) -> None:
        """The thread's whole life. Who is not let in leaves no trace; a channel that breaks is told as `RouteLost`."""
        try:
            preface = self._let_in()
            if preface is not None:
                self._serve((preface.node, preface.boot_id), preface.link_id)
        finally:
            self._sock.close()

    def _let_in(self) -> Preface | None:
        settings = self._settings
        timeout_s = min(PREFACE_WAIT_S, settings.io_timeout_s)
        wire = Wire(self._sock, stop_fd=settings.stop_fd, io_timeout_s=timeout_s)
        try:
            preface = Preface.decode(wire.read_exactly(PREFACE_BYTES))
            if self._check_key(preface.key) != (preface.node, preface.boot_id):
                return None
            wire.write_all(Ack(0, Status.ACCEPTED).encode())
        except (ChannelLost, FrameError, Stopped):
            return None
        return preface

    def _serve(self, peer: Sender, link_id: int) -> None:
        self._peers.enter(peer, link_id)
        message = self._answer_frames(peer, link_id)
        self._sock.close()
        if self._peers.leave(peer, link_id) and message is not None:
            self._events.put(RouteLost(*peer, True, message, self._sinks.over(peer, link_id)))

    def _answer_frames(self, peer: Sender, link_id: int) -> str | None:
        """Until the channel ends: why it broke; None when the transport stops."""
        wire = Wire(self._sock, stop_fd=self._settings.stop_fd, io_timeout_s=self._settings.io_timeout_s)
        try:
            while True:
                frame = Frame.decode(wire.read_exactly(FRAME_BYTES, patient=True))
                if frame.kind is not self._kind:
                    raise FrameError(f"a frame of kind {frame.kind.name}, this channel carries {self._kind.name}")
                wire.write_all(self._frame(wire, frame, peer, link_id).encode())
        except Stopped:
            return None
        except (ChannelLost, FrameError) as error:
            return f"data channel from {peer[0]}: {error}"
        except Exception as error:  # noqa: BLE001 - a thread that ends without a word would look like an idle peer
            return f"data channel from {peer[0]}: {error!r}"

    def _frame(self, wire: Wire, frame: Frame, peer: Sender, link_id: int) -> Ack:
        """Reads one frame to its end, whatever becomes of it."""
        rows = self._read_rows(wire, frame) if frame.kind is BodyKind.ADDRESSES else None
        unread_bytes = frame.payload_bytes if rows is None else 0
        try:
            with self._sinks.claim(
                peer, frame.sink_id, frame.layer, frame.first_block, frame.payload_bytes, link_id
            ) as claim:
                destination = claim.destination
                try:
                    self._fill(wire, claim, destination, rows)
                finally:
                    unread_bytes = 0 if rows is not None else destination.left_bytes
        except FrameRefused as refused:
            wire.drain(unread_bytes)
            return Ack(frame.sequence, refused.status, 0, refused.detail)
        except OSError as error:
            return Ack(frame.sequence, Status.FAILED, 0, error.errno or errno.EIO)
        return Ack(frame.sequence, Status.APPLIED, frame.payload_bytes)

    def _fill(self, wire: Wire, claim: Claim, destination: Cursor, rows: IoVec | None) -> None:
        """Bytes into their slices: off the wire, or pulled from the rows of a body by address."""
        if rows is None:
            while destination.left_bytes:
                wire.await_bytes(destination.left_bytes)
                self._sinks.write(claim, lambda: wire.receive_step(destination))
            return
        source = Cursor(rows)
        while destination.left_bytes:
            self._sinks.write(claim, lambda: pull_step(self._peer_pid, destination, source))
        wire.check_open()

    def _read_rows(self, wire: Wire, frame: Frame) -> IoVec:
        """The sender's slices. Raises `FrameError` unless they add up to the payload."""
        raw = wire.read_exactly(frame.slices * SLICE_ROW_BYTES)
        rows = np.frombuffer(raw, dtype=np.uint64).reshape(-1, 2)
        longest_bytes = int(rows[:, 1].max()) if len(rows) else 0
        if longest_bytes > frame.payload_bytes or int(rows[:, 1].sum()) != frame.payload_bytes:
            raise FrameError(f"{len(rows)} slices do not add up to the frame's {frame.payload_bytes} bytes")
        return rows

"""One end of a reliable connection: made, connected with its class's marks, read back, failed, destroyed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvmoverd.adapters.transport.verbs.fabric import FabricError, Writes
from kvmoverd.adapters.transport.verbs.gids import Gid
from kvmoverd.adapters.transport.verbs.library import Library, errno_of
from kvmoverd.adapters.transport.verbs.pointers import queue_pair_address
from kvmoverd.adapters.transport.verbs.ports import LinkLayer, PortFacts, mtu_code, place_of
from kvmoverd.adapters.transport.verbs.posting import COMPILED, CompiledPosts, Posts, PyverbsPosts
from kvmoverd.adapters.transport.verbs.reaching import reach
from kvmoverd.core.qos import Marks
from kvmoverd.ports.connection import PathEnd

HOPS_MAX = 64
READS_MAX = 1
"""Nothing here reads remotely; some devices refuse 0."""
_GID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Retries:
    """How long a queue pair tries: `timeout` is 4.096 us * 2^n for each of `retry` tries; the last two are for a peer that is
    there but has no receive slot posted, 7 being for ever: links count slots, so it only ever bridges a slow start.
    """

    timeout: int = 14
    retry: int = 7
    no_slot_timer: int = 12
    no_slot_retry: int = 7


@dataclass(frozen=True, slots=True)
class Home:
    """What all queue pairs of a port share. `place`: of its device, when it was opened."""

    library: Library
    context: Any
    domain: Any
    queue: Any
    facts: PortFacts
    gid: Gid
    cnic: int
    retries: Retries
    place: int = 0


class VerbsQueuePair:
    """A `QueuePair`. `cause`: the first failure that its work had, in words; `handle`: the object of pyverbs; `address`: of
    the struct that the helper posts to, 0: pyverbs posts.
    """

    def __init__(self, home: Home, send_max: int, receive_max: int, gone: Callable[[int], None]) -> None:
        self._home = home
        self._gone = gone
        self.cause = ""
        self.completions_max = send_max + receive_max
        self.handle = _make(home, send_max, receive_max)
        self.number = int(self.handle.qp_num)
        self._struct = queue_pair_address(self.handle, home.domain, home.context)
        self.address = self._struct if COMPILED else 0
        self._posts: Posts = CompiledPosts(self.address) if self.address else PyverbsPosts(home.library, self.handle)
        facts = home.facts
        self.end = PathEnd(home.cnic, self.number, secrets.randbits(24), home.gid.raw, facts.lid, facts.mtu_bytes)

    def __repr__(self) -> str:
        return f"<queue pair {self.number} of {self._home.facts.name}>"

    def connect(self, peer: PathEnd, marks: Marks) -> None:
        """Raises `FabricError`; then the pair is to be destroyed. Takes a second where the peer's address does not answer."""
        home = self._home
        self._check(peer)
        attributes = self._attributes(peer, marks)
        try:
            if self._struct:
                reach(home.library, self._struct, attributes, peer.gid)
            self.handle.to_rts(attributes)
        except OSError as why:
            raise FabricError(f"{self!r} can't be connected to {_words(peer)}: {os.strerror(why.errno or 0)}") from why
        except home.library.error as why:
            raise FabricError(f"{self!r} can't be connected to {_words(peer)}: {_said(why)}") from why
        compare_marks(repr(self), home.facts.link_layer, marks, self.attributes(home.library.enums.IBV_QP_AV).ah_attr)

    def attributes(self, mask: int) -> Any:
        """What the device says of it, `IBV_QP_*` of the mask. Raises `FabricError`."""
        try:
            found, _ = self.handle.query(mask)
        except self._home.library.error as why:
            raise FabricError(f"{self!r} tells nothing of itself: {_said(why)}") from why
        return found

    def post_writes(self, writes: Writes, work_id: int, immediate: int | None) -> None:
        self._posts.writes(writes, work_id, immediate)

    def post_message(self, address: int, size_bytes: int, key: int, work_id: int) -> None:
        self._posts.message(address, size_bytes, key, work_id)

    def post_receive(self, address: int, size_bytes: int, key: int, work_id: int) -> None:
        self._posts.receive(address, size_bytes, key, work_id)

    def fail(self) -> None:
        """A device that refuses is not asked again: `destroy` is what counts, and comes next."""
        enums = self._home.library.enums
        attributes = self._home.library.qp.QPAttr()
        attributes.qp_state = enums.IBV_QPS_ERR
        try:
            self.handle.modify(attributes, enums.IBV_QP_STATE)
        except self._home.library.error as why:
            self.cause = self.cause or f"the error state was refused: {_said(why)}"

    def destroy(self) -> None:
        """Raises `FabricError` when the device keeps it: then nothing may be taken for quiet."""
        try:
            self.handle.close()
        except self._home.library.error as why:
            # Before the kernel forgets a device it ends all that anybody has of it, and answers EIO from then on.
            if errno_of(why) != errno.EIO or self._home.place == place_of(self._home.facts.device):
                raise FabricError(f"{self!r} can't be destroyed: {_said(why)}") from why
        self._posts.close()
        self._gone(self.number)

    def _check(self, peer: PathEnd) -> None:
        if len(peer.gid) != _GID_BYTES:
            raise FabricError(f"{self!r}: the peer's GID has {len(peer.gid)} bytes, not {_GID_BYTES}")
        mine, theirs = self._home.gid, Gid(0, peer.gid, "")
        if self._home.facts.link_layer is LinkLayer.ETHERNET and mine.address.version != theirs.address.version:
            raise FabricError(
                f"{self!r} has GID {mine.text}, the peer {theirs.text}: an IPv4 and an IPv6 address don't meet; set "
                f"transport.verbs.gid_index on one of the nodes"
            )

    def _attributes(self, peer: PathEnd, marks: Marks) -> Any:
        home, retries = self._home, self._home.retries
        found = home.library.qp.QPAttr(port_num=home.facts.port)
        found.qp_access_flags = home.library.enums.IBV_ACCESS_LOCAL_WRITE | home.library.enums.IBV_ACCESS_REMOTE_WRITE
        found.ah_attr = self._route(peer, marks)
        found.path_mtu = mtu_code(min(home.facts.mtu_bytes, peer.mtu_bytes))
        found.dest_qp_num = peer.qp_number
        found.sq_psn, found.rq_psn = self.end.packet_number, peer.packet_number
        found.max_rd_atomic = found.max_dest_rd_atomic = READS_MAX
        found.timeout, found.retry_cnt = retries.timeout, retries.retry
        found.min_rnr_timer, found.rnr_retry = retries.no_slot_timer, retries.no_slot_retry
        return found

    def _route(self, peer: PathEnd, marks: Marks) -> Any:
        """InfiniBand needs the global header only between subnets; a LID of 0 has no other way."""
        home, addr = self._home, self._home.library.addr
        port = home.facts.port
        same_subnet = peer.lid and peer.gid[:8] == home.gid.raw[:8]
        if home.facts.link_layer is LinkLayer.INFINIBAND and same_subnet:
            return addr.AHAttr(port_num=port, dlid=peer.lid, sl=marks.service_level)
        route = addr.GlobalRoute(
            dgid=addr.GID(_gid_words(peer.gid)),
            sgid_index=home.gid.index,
            hop_limit=HOPS_MAX,
            traffic_class=marks.traffic_class,
            flow_label=marks.flow_label,
        )
        return addr.AHAttr(port_num=port, dlid=peer.lid, is_global=1, gr=route, sl=marks.service_level)


def compare_marks(who: str, layer: LinkLayer, marks: Marks, found: Any) -> None:
    """Of what was asked, and what the device says it does: the one that the link layer goes by. Raises `FabricError`.

    A flow label of 0 is not compared: there are devices that don't tell it.
    """
    if layer is LinkLayer.INFINIBAND:
        pairs = [("service level", marks.service_level, found.sl)]
    else:
        pairs = [("traffic class", marks.traffic_class, found.traffic_class)]
        if found.flow_label:
            pairs.append(("flow label", marks.flow_label, found.flow_label))
    for name, asked, told in pairs:
        if asked != told:
            raise FabricError(
                f"{who} was given {name} {asked} and has {told}: it would not run on the KV lane; something overrides it, "
                f"`kvmoverd doctor` looks for what"
            )


def _make(home: Home, send_max: int, receive_max: int) -> Any:
    """In the state INIT, from which it can fail."""
    library, enums = home.library, home.library.enums
    room = library.qp.QPCap(max_send_wr=send_max, max_recv_wr=receive_max, max_send_sge=1, max_recv_sge=1)
    wanted = library.qp.QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=home.queue, rcq=home.queue, cap=room, sq_sig_all=0)
    try:
        pair = library.qp.QP(home.domain, wanted)
    except library.error as why:
        raise FabricError(
            f"{home.facts.name} makes no queue pair of {send_max} + {receive_max} requests: {_said(why)}"
        ) from why
    attributes = library.qp.QPAttr(port_num=home.facts.port)
    attributes.qp_access_flags = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
    try:
        pair.to_init(attributes)
    except library.error as why:
        pair.close()
        raise FabricError(f"{home.facts.name} initialises no queue pair: {_said(why)}") from why
    return pair


def _gid_words(gid: bytes) -> str:
    """As pyverbs takes it: 8 words."""
    return ":".join(gid[at : at + 2].hex() for at in range(0, _GID_BYTES, 2))


def _words(peer: PathEnd) -> str:
    return f"queue pair {peer.qp_number} at {Gid(0, peer.gid, '').text}, lid {peer.lid}"


def _said(why: Exception) -> str:
    code = errno_of(why)
    return f"{why} ({os.strerror(code)})" if code else str(why)

"""What lies in etcd, and under which keys: one for each node, one for the scheduler that leads."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from kvmover_proto import etcd_pb2
from kvmoverd.adapters.membership import etcd_wire
from kvmoverd.adapters.membership.etcd_wire import EtcdWire
from kvmoverd.ports.membership import Member

VALUE_BYTES_MAX = 4_096
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:.]{2,64}\]|[^\s:\[\]/\0-\x1f\x7f-\U0010ffff]{1,253}):\d{1,5}")
BOOT_ID = re.compile(r"[\x21-\x7e]{0,128}")
"""What others have written is dialled and logged: nothing else than what a daemon of ours writes is taken."""


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys begin with `prefix`, which has no "/" at its end."""

    prefix: str

    def node(self, name: str) -> bytes:
        return f"{self.prefix}/nodes/{name}".encode()

    @property
    def leader(self) -> bytes:
        return f"{self.prefix}/scheduler/leader".encode()

    @property
    def all(self) -> tuple[bytes, bytes]:
        """The first key of all, and the end of them: "0" comes after "/"."""
        return f"{self.prefix}/".encode(), f"{self.prefix}0".encode()

    def node_of(self, key: bytes) -> str:
        """The node's name; empty for a key of something else."""
        begin = self.node("")
        name = key[len(begin) :].decode("ascii", "replace") if key.startswith(begin) else ""
        return name if NAME.fullmatch(name) else ""


def member_value(member: Member, version: str) -> bytes:
    words = {"address": member.address, "boot_id": member.boot_id, "version": version}
    return json.dumps(words, separators=(",", ":")).encode()


def member_of(name: str, value: bytes) -> Member | None:
    """None for a value that no daemon of ours has written."""
    address, boot_id = _who(value)
    return Member(name, address, boot_id) if address else None


def leader_value(address: str, boot_id: str) -> bytes:
    return json.dumps({"address": address, "boot_id": boot_id}, separators=(",", ":")).encode()


def leader_of(value: bytes) -> tuple[str, str]:
    """Address and boot id; both empty for a value that no scheduler of ours has written."""
    return _who(value)


def _who(value: bytes) -> tuple[str, str]:
    words = _words(value)
    address, boot_id = words.get("address"), words.get("boot_id")
    if not (isinstance(address, str) and isinstance(boot_id, str)):
        return "", ""
    return (address, boot_id) if ADDRESS.fullmatch(address) and BOOT_ID.fullmatch(boot_id) else ("", "")


def _words(value: bytes) -> dict[str, object]:
    try:
        words = json.loads(value) if len(value) <= VALUE_BYTES_MAX else None
    except (ValueError, RecursionError):
        return {}
    return words if isinstance(words, dict) else {}


@dataclass(frozen=True, slots=True)
class Made:
    """`revision`: the key's create revision. `is_ours`: it was made now. `value`, `lease_id`: what was there else."""

    revision: int
    is_ours: bool
    value: bytes = b""
    lease_id: int = 0


async def make(wire: EtcdWire, key: bytes, value: bytes, lease_id: int, *, over: int = 0) -> Made:
    """Puts the key if its create revision is `over`; 0: if there is none. Raises `EtcdUnreachable`, `EtcdRefused`."""
    answer = await wire.call(
        etcd_wire.TXN,
        etcd_pb2.TxnRequest(
            compare=[etcd_pb2.Compare(result=0, target=1, key=key, create_revision=over)],
            success=[etcd_pb2.RequestOp(put=etcd_pb2.PutRequest(key=key, value=value, lease=lease_id))],
            failure=[etcd_pb2.RequestOp(range=etcd_pb2.RangeRequest(key=key))],
        ),
        etcd_pb2.TxnResponse,
    )
    if answer.succeeded:
        return Made(over or answer.header.revision, is_ours=True)
    for there in answer.responses[0].range.kvs:
        # A call that was tried again at another endpoint may meet what it has made itself.
        return Made(there.create_revision, there.lease == lease_id, there.value, there.lease)
    return Made(0, is_ours=False)

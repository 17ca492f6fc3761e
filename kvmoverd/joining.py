"""Membership as the config asks for it, and what a daemon does about other nodes' starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvmoverd import __version__
from kvmoverd.adapters.membership.etcd import EtcdMembership
from kvmoverd.adapters.membership.etcd_election import EtcdElection
from kvmoverd.adapters.membership.etcd_wire import EtcdAccess
from kvmoverd.adapters.membership.static import StaticMembership
from kvmoverd.config import Config
from kvmoverd.config_membership import EtcdConfig, MembershipConfig
from kvmoverd.node.node import Node
from kvmoverd.ports.membership import Member
from kvmoverd.rpc.scheduler_relay import SchedulerSide

log = logging.getLogger(__name__)

BOOTS_MAX = 65_536

Lost = Callable[[str, str, str], None]
"""Told of a node, its boot id and why it is void."""


def membership_of(config: MembershipConfig, peers: Mapping[str, str]) -> StaticMembership | EtcdMembership:
    """To be started. Raises `ConfigError` for a file that can't be read."""
    etcd = config.etcd
    if etcd is None:
        return StaticMembership(peers)
    return EtcdMembership(_access(etcd), etcd.prefix, ttl_s=etcd.ttl_s, version=__version__)


def election_of(
    etcd: EtcdConfig, *, address: str, boot_id: str, on_lead: Callable[[int], None], on_follow: Callable[[str], None]
) -> EtcdElection:
    """To be started. Raises `ConfigError` for a file that can't be read."""
    return EtcdElection(
        _access(etcd),
        etcd.prefix,
        address=address,
        boot_id=boot_id,
        ttl_s=etcd.ttl_s,
        on_lead=on_lead,
        on_follow=on_follow,
    )


def scheduler_of(config: Config, node: Node, elected: Callable[[], str]) -> SchedulerSide | None:
    """To be started; None: the node belongs to no scheduler. `elected`: address of the one that leads, as the members know it.

    Addresses in the config come before what is elected.
    """
    given = config.scheduler.addresses
    if not given and config.membership.etcd is None:
        return None
    return SchedulerSide(
        node,
        lambda: given or (elected(),),
        timeout_s=config.scheduler.timeout_s,
        waits_max=config.engine_api.streams_max // 2,
    )


def _access(etcd: EtcdConfig) -> EtcdAccess:
    ca, cert, key = etcd.pems()
    return EtcdAccess(etcd.endpoints, etcd.timeout_s, etcd.user, etcd.password(), ca, cert, key)


class Boots:
    """Remembers the boots of nodes that are gone, too: that of the one which came first is forgotten past `BOOTS_MAX`.

    A node that starts anew is another one: what there was with its former start is over. One that is gone may live on,
    cut off from etcd only: whoever talks to it finds out by himself."""

    def __init__(self, own_node: str, on_lost: Lost) -> None:
        self._own_node = own_node
        self._on_lost = on_lost
        self._boots: dict[str, str] = {}

    def told(self, member: Member, there: bool) -> None:
        if member.node == self._own_node:
            return
        if not there:
            log.info("node %s at %s, boot %s, has left", member.node, member.address, member.boot_id)
            return
        before = self._boots.pop(member.node, "")
        self._boots[member.node] = member.boot_id
        if len(self._boots) > BOOTS_MAX:
            del self._boots[next(iter(self._boots))]
        log.info("node %s at %s, boot %s, is there", member.node, member.address, member.boot_id)
        if before and before != member.boot_id:
            self._on_lost(member.node, before, f"it has started anew, as boot {member.boot_id}")

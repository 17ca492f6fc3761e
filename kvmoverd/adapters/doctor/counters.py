"""Checks of counters: what a port lost, repeated, or was told to wait for; once, or how it grows while it is watched."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

from kvmoverd.adapters.doctor import ethtool
from kvmoverd.adapters.doctor.finding import Finding, Findings, Look, ok, skip, warn
from kvmoverd.adapters.doctor.rdma import NO_DEVICE, used_ports
from kvmoverd.adapters.sysfs import infiniband
from kvmoverd.adapters.sysfs.infiniband import Port

LOSSES = {
    "out_of_buffer": "messages found no receive slot",
    "out_of_sequence": "packets were lost on the way",
    "packet_seq_err": "the other end asked for packets again",
    "local_ack_timeout_err": "no answer in time",
    "rnr_nak_retry_err": "the other end was not ready",
    "req_transport_retries_exceeded": "connections broke for want of an answer",
    "req_rnr_retries_exceeded": "connections broke for want of a receive slot",
    "rx_icrc_encapsulated": "packets were damaged",
    "port_rcv_errors": "packets were damaged",
    "port_xmit_discards": "packets were dropped before they were sent",
    "symbol_error": "the cable or the plug is bad",
    "link_error_recovery": "the link recovered from an error",
    "link_downed": "the link went down",
    "rcvd_seq_err": "packets were lost on the way",
    "out_of_seq_request": "packets were lost on the way",
    "rcvd_rnr_err": "the other end was not ready",
    "completer_retry_err": "no answer in time",
    "retry_exceeded_err": "connections broke for want of an answer",
    "retry_rnr_exceeded_err": "connections broke for want of a receive slot",
}
"""Counters that should stand still, of mlx5, bnxt, InfiniBand ports and Soft-RoCE, and what a step means."""
WAITS = {
    "port_xmit_wait": "ticks that the port had something to send and no credit",
    "np_cnp_sent": "congestion told to senders",
    "rp_cnp_handled": "congestion told to this node, which slowed down",
    "np_ecn_marked_roce_packets": "packets that a switch marked",
}
"""Counters that grow in a busy fabric, and show where."""
_PAUSES = re.compile(r"(?:rx|tx)_(?:prio\d_pause|pause_ctrl_phy|global_pause|pfc\d?|pause)(?:_duration)?")
_DROPS = re.compile(r"rx_out_of_buffer|rx_prio\d_discards|(?:rx|tx)_discards_phy")
_REMEDY = "docs/fabric.md: is the class lossless at both ends and in each switch, and is the cable good?"
_SHOWN_MAX = 6


def check_counters(look: Look) -> Findings:
    ports = used_ports(look)
    if not ports:
        yield skip(NO_DEVICE if not infiniband.devices(look.tree) else "no port in use")
        return
    before = [infiniband.counters(look.tree, port) for port in ports]
    time.sleep(look.watch_s)
    for port, first in zip(ports, before, strict=True):
        now = infiniband.counters(look.tree, port)
        yield _losses(look, port, _grown(first, now) if look.watch_s else now)


def _grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: number - before.get(name, 0) for name, number in now.items()}


def _losses(look: Look, port: Port, counted: Mapping[str, int]) -> Finding:
    if not counted:
        return skip(f"{port.name}: the driver has no counters that can be read")
    since = f"in {look.watch_s:g} s" if look.watch_s else "since the driver was loaded"
    lost = [f"{name} {counted[name]} ({what})" for name, what in LOSSES.items() if counted.get(name)]
    waits = [f"{name} {counted[name]} ({what})" for name, what in WAITS.items() if counted.get(name)]
    seen = sum(name in counted for name in (*LOSSES, *WAITS))
    found = f"{port.name}, {since}: {'; '.join([*lost, *waits][:_SHOWN_MAX]) or f'0 in all {seen} counters of losses and waits'}"
    if not lost:
        return ok(found)
    return warn(found, _REMEDY if look.watch_s else f"doctor --watch 10 says whether they still grow; {_REMEDY}")


def check_pauses(look: Look) -> Findings:
    """PFC by priority, as the Ethernet driver counts it."""
    names = sorted({port.netdev for port in used_ports(look) if port.netdev})
    if not names:
        yield skip("no RoCE port in use")
        return
    before = {name: _statistics(name) for name in names}
    time.sleep(look.watch_s)
    for name in names:
        now = _statistics(name)
        yield from _pauses(look, name, _grown(before[name], now) if look.watch_s else now)


def _statistics(name: str) -> Mapping[str, int]:
    """Without any where the interface has just gone, or its driver gives none."""
    try:
        return ethtool.statistics(name)
    except OSError:
        return {}


def _pauses(look: Look, name: str, counted: Mapping[str, int]) -> Iterator[Finding]:
    since = f"in {look.watch_s:g} s" if look.watch_s else "since the driver was loaded"
    pauses = {key: number for key, number in counted.items() if _PAUSES.fullmatch(key)}
    drops = [f"{key} {number}" for key, number in counted.items() if _DROPS.fullmatch(key) and number]
    if not pauses:
        yield skip(f"{name}: its driver counts no pause frames")
        return
    words = [f"{key} {number}" for key, number in sorted(pauses.items(), key=lambda one: -one[1]) if number]
    found = f"{name}, {since}: {'; '.join([*drops, *words][:_SHOWN_MAX]) or 'no pause frames'}"
    if drops:
        yield warn(found, f"a lossless class drops nothing: mlnx_qos -i {name} shows its buffers and PFC; {_REMEDY}")
    else:
        yield ok(found)

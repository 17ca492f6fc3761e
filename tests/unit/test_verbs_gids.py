"""Which GID of a port is used: tables as they are found on bonds, in containers, on IPv6 networks and on InfiniBand."""

from __future__ import annotations

from ipaddress import IPv6Address
from pathlib import Path

import pytest

from kvmoverd.adapters.transport.verbs.gids import INFINIBAND, ROCE_1, ROCE_2, Gid, Rank, choose, rank, read_table
from kvmoverd.core.errors import TransportRefused

PORT = "mlx5_0:1"


def gid(index: int, address: str, kind: str = ROCE_2, netdev: str = "eth2") -> Gid:
    whole = f"::ffff:{address}" if "." in address else address
    return Gid(index, IPv6Address(whole).packed, kind, netdev)


def chosen(*gids: Gid, wanted: int = -1) -> int:
    return choose(gids, port=PORT, wanted=wanted).gid.index


# As a ConnectX shows one address: v1 before v2, link-local before the address.
ONE_ADDRESS = (
    gid(0, "fe80::1", ROCE_1),
    gid(1, "fe80::1", ROCE_2),
    gid(2, "10.77.0.1", ROCE_1),
    gid(3, "10.77.0.1", ROCE_2),
)


def test_of_a_usual_table_it_is_the_address_in_version_2() -> None:
    found = choose(ONE_ADDRESS, port=PORT)
    assert found.gid.index == 3
    assert found.words == "GID 3 of 4: ::ffff:10.77.0.1, RoCE v2, eth2"


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (gid(5, "198.51.100.7"), gid(1, "198.51.100.7", netdev="")),
        (gid(5, "198.51.100.7", netdev=""), gid(1, "10.0.0.1")),
        (gid(5, "10.0.0.1"), gid(1, "10.0.0.1", netdev="")),
        (gid(5, "10.0.0.1", netdev=""), gid(1, "10.0.0.1", netdev="docker0")),
        (gid(5, "172.17.0.1", netdev="docker0"), gid(1, "fe80::1")),
        (gid(5, "fe80::1"), gid(1, "::1")),
        (gid(5, "fe80::1"), gid(1, "198.51.100.7", ROCE_1)),
        (gid(5, "2001:db8::1"), gid(1, "10.0.0.1")),
        (gid(5, "10.0.0.1"), gid(1, "fd00::1")),
        (gid(1, "10.0.0.1"), gid(5, "10.0.0.2")),
    ],
)
def test_what_reaches_further_wins_wherever_it_stands(better: Gid, worse: Gid) -> None:
    assert chosen(better, worse) == chosen(worse, better) == better.index


def test_a_bond_with_link_local_addresses_only_is_used_and_called_degraded() -> None:
    found = choose([gid(0, "fe80::1", ROCE_1, "bond0"), gid(1, "fe80::1", ROCE_2, "bond0")], port=PORT)
    assert found.gid.index == 1
    assert "degraded: link-local" in found.words


def test_null_rows_are_none() -> None:
    null = Gid(0, bytes(16), ROCE_2)
    assert chosen(null, gid(4, "10.0.0.1")) == 4
    with pytest.raises(TransportRefused, match=r"mlx5_0:1 has no GID: give its network interface an address"):
        choose([null], port=PORT)


def test_an_ipv6_network_works_like_any_other() -> None:
    found = choose([gid(0, "fe80::9"), gid(1, "2001:db8::9")], port=PORT)
    assert (found.gid.index, found.words) == (1, "GID 1 of 2: 2001:db8::9, RoCE v2, eth2")


@pytest.mark.parametrize("name", ["docker0", "br-0a1b2c", "cni0", "flannel.1", "cali12", "vxlan.calico", "virbr0"])
def test_interfaces_of_containers_and_overlays_are_degraded(name: str) -> None:
    assert rank(gid(1, "198.51.100.7", netdev=name)) is Rank.OVERLAY


def test_the_end_of_a_veth_is_what_a_container_has_and_not_degraded() -> None:
    assert rank(gid(1, "10.77.0.1", netdev="veth0")) is Rank.PRIVATE


def test_an_ipv4_link_local_address_is_degraded() -> None:
    assert rank(gid(1, "169.254.3.4")) is Rank.LINK_LOCAL


def test_on_infiniband_it_is_the_ports_own() -> None:
    found = choose([gid(1, "fec0::5", INFINIBAND, ""), gid(0, "fe80::5", INFINIBAND, "")], port=PORT, infiniband=True)
    assert (found.gid.index, found.words) == (0, "GID 0 of 2: fe80::5, IB")


def test_what_the_config_names_is_taken_or_refused_with_the_table() -> None:
    found = choose(ONE_ADDRESS, port=PORT, wanted=2)
    assert (found.gid.index, found.words[-13:]) == (2, "as configured")
    with pytest.raises(
        TransportRefused, match=r"has no GID 7; it has 0: fe80::1 \(RoCE v1\).*transport.verbs.gid_index"
    ):
        choose(ONE_ADDRESS, port=PORT, wanted=7)


def write_port(port: Path, link_layer: str, rows: dict[int, tuple[str, str, str]]) -> None:
    """(address, what `types` says, interface)."""
    (port / "gids").mkdir(parents=True)
    for name in ("types", "ndevs"):
        (port / "gid_attrs" / name).mkdir(parents=True)
    (port / "link_layer").write_text(link_layer + "\n")
    for index, (address, told, netdev) in rows.items():
        (port / "gids" / str(index)).write_text(IPv6Address(address).exploded + "\n")
        if told:
            (port / "gid_attrs" / "types" / str(index)).write_text(told + "\n")
        if netdev:
            (port / "gid_attrs" / "ndevs" / str(index)).write_text(netdev + "\n")


def test_a_table_of_sysfs_is_read_by_index_without_its_empty_rows(tmp_path: Path) -> None:
    rows = {
        0: ("fe80::1", "IB/RoCE v1", "eth2"),
        1: ("fe80::1", "RoCE v2", "eth2"),
        2: ("::", "", ""),
        10: ("::ffff:10.0.0.1", "RoCE v2", ""),
    }
    write_port(tmp_path / "1", "Ethernet", rows)
    assert read_table(tmp_path / "1") == [
        gid(0, "fe80::1", ROCE_1),
        gid(1, "fe80::1", ROCE_2),
        gid(10, "10.0.0.1", ROCE_2, ""),
    ]


def test_the_kernels_word_for_both_means_infiniband_on_infiniband(tmp_path: Path) -> None:
    write_port(tmp_path / "1", "InfiniBand", {0: ("fe80::5", "IB/RoCE v1", "")})
    assert read_table(tmp_path / "1") == [gid(0, "fe80::5", INFINIBAND, "")]


def test_a_port_that_is_gone_has_no_table(tmp_path: Path) -> None:
    assert read_table(tmp_path / "7") == []

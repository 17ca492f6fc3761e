"""What a daemon makes of what membership tells of other nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmoverd import joining
from kvmoverd.adapters.membership.etcd import EtcdMembership
from kvmoverd.adapters.membership.static import StaticMembership
from kvmoverd.config_membership import EtcdConfig, MembershipConfig
from kvmoverd.core.errors import ConfigError
from kvmoverd.joining import Boots, membership_of
from kvmoverd.ports.membership import Member


def of(node: str, boot_id: str) -> Member:
    return Member(node, f"{node}:9401", boot_id)


class Losses:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def __call__(self, node: str, boot_id: str, message: str) -> None:
        assert message
        self.told.append((node, boot_id))


def test_a_node_that_starts_anew_has_lost_its_former_boot() -> None:
    losses = Losses()
    boots = Boots("pe", losses)
    boots.told(of("de", "b1"), True)
    boots.told(of("de", "b1"), False)
    boots.told(of("de", "b2"), True)
    assert losses.told == [("de", "b1")]


def test_a_node_that_leaves_and_comes_back_under_its_boot_has_lost_nothing() -> None:
    losses = Losses()
    boots = Boots("pe", losses)
    for _ in range(2):
        boots.told(of("de", "b1"), True)
        boots.told(of("de", "b1"), False)
    assert losses.told == []


def test_what_is_told_of_this_node_itself_counts_for_nothing() -> None:
    losses = Losses()
    boots = Boots("pe", losses)
    for boot_id in ("b1", "b2"):
        boots.told(of("pe", boot_id), True)
        boots.told(of("pe", boot_id), False)
    assert losses.told == []


def test_boots_of_nodes_that_never_come_back_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "BOOTS_MAX", 2)
    losses = Losses()
    boots = Boots("pe", losses)
    for node in ("a", "b", "a", "c"):
        boots.told(of(node, "b1"), True)
    for node in ("a", "b"):
        boots.told(of(node, "b2"), True)
    assert losses.told == [("a", "b1")], "the one that came first was forgotten: that is b, since a came again"


def test_the_config_says_which_membership_there_is() -> None:
    peers = {"de": "10.0.0.2:9401"}
    static = membership_of(MembershipConfig("static", None), peers)
    assert isinstance(static, StaticMembership)
    assert static.nodes() == ["de"]
    etcd = EtcdConfig(("localhost:1",), "/kvmoverd", 5.0, 2.0, "", None, None, None, None)
    assert isinstance(membership_of(MembershipConfig("etcd", etcd), {}), EtcdMembership)


def test_a_file_that_can_not_be_read_is_told_by_its_name(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    etcd = EtcdConfig(("localhost:1",), "/kvmoverd", 5.0, 2.0, "u", secret, None, None, None)
    with pytest.raises(ConfigError, match=r"can't read .*secret"):
        membership_of(MembershipConfig("etcd", etcd), {})

"""Settings of membership: what is taken, what is refused, and that the refusal names the key or the file."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvmoverd import config
from kvmoverd.config_membership import ENDPOINTS_MAX, EtcdConfig, MembershipConfig, membership_config
from kvmoverd.core.errors import ConfigError
from kvmoverd.toml_table import Table

BASE = Path("/etc/kvmoverd")
ONE: dict[str, Any] = {"endpoints": ["10.0.0.1:2379"]}


def of_etcd(base: Path = BASE, **keys: object) -> EtcdConfig:
    found = membership_config(Table({"kind": "etcd", "etcd": ONE | keys}, "membership"), base).etcd
    assert found is not None
    return found


def refused(**keys: object) -> str:
    with pytest.raises(ConfigError) as error:
        of_etcd(**keys)
    return str(error.value)


def test_without_a_section_the_list_is_static() -> None:
    assert membership_config(Table({}, "membership"), BASE) == MembershipConfig("static", None)


def test_endpoints_are_enough_for_etcd() -> None:
    found = of_etcd(endpoints=["10.0.0.1:2379", "[fd00::1]:2379", "etcd-3.example:2379"])
    assert found.endpoints == ("10.0.0.1:2379", "[fd00::1]:2379", "etcd-3.example:2379")
    assert (found.prefix, found.ttl_s, found.timeout_s, found.user) == ("/kvmoverd", 5.0, 2.0, "")
    assert found.password() == ""
    assert found.pems() == (b"", b"", b"")


def test_files_are_beside_the_config() -> None:
    found = of_etcd(user="u", password_file="secret", ca="/pki/ca.pem", cert="c.pem", key="k.pem")
    assert (found.password_file, found.ca) == (BASE / "secret", Path("/pki/ca.pem"))
    assert (found.cert, found.key) == (BASE / "c.pem", BASE / "k.pem")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"endpoints": []}, "membership.etcd.endpoints is missing"),
        ({"endpoints": ["10.0.0.1"]}, "membership.etcd.endpoints[0]"),
        ({"endpoints": ["http://10.0.0.1:2379"]}, "membership.etcd.endpoints[0]"),
        ({"endpoints": ["a:1", "a:1"]}, "twice"),
        ({"endpoints": [f"a:{port}" for port in range(1, ENDPOINTS_MAX + 2)]}, "at most 16"),
        ({"prefix": "kvmoverd"}, "membership.etcd.prefix"),
        ({"prefix": "/kvmoverd/"}, "membership.etcd.prefix"),
        ({"prefix": "/" + "x" * 200}, "membership.etcd.prefix"),
        ({"ttl": "1s"}, "membership.etcd.ttl is 1s, must be 2s to 600s"),
        ({"ttl": 5}, "membership.etcd.ttl"),
        ({"timeout": "10ms"}, "membership.etcd.timeout is 10ms"),
        ({"user": "u"}, "membership.etcd.password_file go together"),
        ({"password_file": "p"}, "membership.etcd.user and"),
        ({"cert": "c", "ca": "a"}, "membership.etcd.key go together"),
        ({"key": "k", "ca": "a"}, "membership.etcd.cert and"),
        ({"cert": "c", "key": "k"}, "membership.etcd.ca is missing"),
        ({"endpoint": "a:1"}, "membership.etcd.endpoint is unknown"),
    ],
)
def test_a_refusal_names_the_key(keys: dict[str, object], told: str) -> None:
    assert told in refused(**keys)


def test_an_unknown_kind_and_an_unknown_key_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"membership\.kind is 'consul'"):
        membership_config(Table({"kind": "consul"}, "membership"), BASE)
    with pytest.raises(ConfigError, match=r"membership\.kinds is unknown"):
        membership_config(Table({"kinds": "etcd"}, "membership"), BASE)


def test_settings_of_etcd_are_checked_where_the_list_is_static_and_not_used() -> None:
    assert membership_config(Table({"etcd": ONE}, "membership"), BASE) == MembershipConfig("static", None)
    with pytest.raises(ConfigError, match=r"membership\.etcd\.endpoint is unknown"):
        membership_config(Table({"kind": "static", "etcd": ONE | {"endpoint": "a:1"}}, "membership"), BASE)


def test_a_password_is_the_files_text_without_its_line_end(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b" p w\xc3\xbc\r\n")
    found = of_etcd(tmp_path, user="u", password_file="secret")
    assert found.password() == " p wü"
    assert "pw" not in repr(found)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "can't read"),
        (b"", "has 0 bytes"),
        (b"\n", "no password"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b"x" * 5000, "has 5000 bytes"),
    ],
)
def test_a_password_that_can_not_be_used_is_refused_with_its_file(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ConfigError, match=told) as error:
        of_etcd(tmp_path, user="u", password_file="secret").password()
    assert "secret" in str(error.value)


def test_a_ca_that_is_none_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nrubbish\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match=r"ca\.pem holds no certificates"):
        of_etcd(tmp_path, ca="ca.pem").pems()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make certificates")
def test_a_key_of_another_certificate_and_an_encrypted_key_are_refused(tmp_path: Path) -> None:
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=x"]
    for name, more in (("a", ["-nodes"]), ("b", ["-nodes"]), ("c", ["-passout", "pass:secret"])):
        files = ["-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.pem")]
        subprocess.run([*made, *more, *files], check=True, capture_output=True)
    assert of_etcd(tmp_path, ca="a.pem", cert="a.pem", key="a.key").pems()[0].startswith(b"-----BEGIN CERT")
    for cert, key in (("a", "b"), ("c", "c")):
        with pytest.raises(ConfigError, match=rf"{cert}\.pem and .*{key}\.key are no certificate and its key"):
            of_etcd(tmp_path, ca="a.pem", cert=f"{cert}.pem", key=f"{key}.key").pems()


NODE = """
[node]
name = "n"
[pool]
bytes = "64MiB"
[[storage]]
name = "s"
kind = "null"
[membership]
kind = "etcd"
[membership.etcd]
endpoints = ["10.0.0.1:2379"]
"""


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("", r"node_api\.advertise is missing: node_api\.listen is 0\.0\.0\.0:9401"),
        (
            '[node_api]\nlisten = "10.0.0.5:9401"\n[transport]\nlisten = "0.0.0.0:9500"\n',
            r"node_api\.advertise is missing: transport\.listen is 0\.0\.0\.0:9500, which no other node can dial",
        ),
        ('[node_api]\nadvertise = "0.0.0.0"\n', r"node_api\.advertise is '0\.0\.0\.0', must be one host"),
        ('[node_api]\nadvertise = "::"\n', r"node_api\.advertise is '::', must be one host"),
        (
            '[node_api]\nadvertise = "a"\n[[peers]]\nname = "b"\naddress = "b:1"\n',
            r"1 \[\[peers\]\] are given, and membership\.kind is \"etcd\", which has its own: take them out",
        ),
    ],
)
def test_a_node_that_etcd_would_name_under_no_address_is_refused(more: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config.parse(tomllib.loads(NODE + more), BASE)


def test_a_node_is_named_by_what_it_advertises_or_where_it_listens() -> None:
    advertised = config.parse(tomllib.loads(NODE + '[node_api]\nadvertise = "pe-3"\n'), BASE)
    assert advertised.node_address(9401) == "pe-3:9401"
    listening = NODE + '[node_api]\nlisten = "10.0.0.5:9401"\n[transport]\nlisten = "10.0.0.5:0"\n'
    assert config.parse(tomllib.loads(listening), BASE).node_address(9401) == "10.0.0.5:9401"

"""A real etcd with users, and with TLS: who may not is told so at its start, and what was known stays in use."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cable_kit import Cable, cable
from etcd_kit import PREFIX, Etcd, Recorder, access, joined, needs_etcd, running, until

from kvmoverd.adapters.membership import etcd as etcd_module
from kvmoverd.adapters.membership import etcd_keys
from kvmoverd.adapters.membership.etcd_wire import EtcdAccess
from kvmoverd.core.errors import ConfigError
from kvmoverd.ports.membership import Member

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make certificates")
pytestmark = [needs_etcd]

PE = Member("pe", "10.0.0.1:9401", "boot-1")
DE = Member("de", "10.0.0.2:9401", "boot-2")
ROOT_FLAG = "--user=root:root-secret"
PASSWORD_S = 3.0
"""etcd takes its time over a password, on a busy machine."""
SETTLES_S = 1.2
"""The lease is kept once more meanwhile."""
SECRET = "kv-secret-7261"
KEYS = etcd_keys.Keys(PREFIX)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """With a user of ours, "kv", who may do what is needed and no more; authentication is off."""
    with running(tmp_path_factory.mktemp("etcd")) as made:
        for words in (
            ("user", "add", "root:root-secret"),
            ("user", "grant-role", "root", "root"),
            ("user", "add", f"kv:{SECRET}"),
            ("user", "add", "guest:guest-secret"),
            ("role", "add", "kv"),
            ("role", "grant-permission", "--prefix=true", "kv", "readwrite", f"{PREFIX}/"),
            ("user", "grant-role", "kv", "kv"),
        ):
            made.ctl(*words)
        yield made


@pytest.fixture
def etcd(server: Etcd) -> Iterator[Etcd]:
    server.ctl("del", "--prefix", PREFIX)
    yield server
    switch_off(server)


@pytest.fixture
def guarded(etcd: Etcd) -> Etcd:
    switch_on(etcd)
    return etcd


def switch_on(etcd: Etcd) -> None:
    etcd.ctl("auth", "enable")
    etcd.ctl_flags[:] = [ROOT_FLAG]


def switch_off(etcd: Etcd) -> None:
    if etcd.ctl_flags:
        etcd.ctl("auth", "disable")
        etcd.ctl_flags.clear()


def as_user(etcd: Etcd | Cable, user: str = "kv", password: str = SECRET) -> EtcdAccess:
    return access(etcd.endpoint, timeout_s=PASSWORD_S, user=user, password=password)


async def refusal(how: EtcdAccess, own: Member | None) -> str:
    with pytest.raises(ConfigError) as refused:
        async with joined(how, own=own):
            pass
    return str(refused.value)


@pytest.mark.parametrize("own", [PE, None], ids=["member", "looks-only"])
async def test_a_wrong_password_is_told_at_the_start_and_never_shown(
    guarded: Etcd, own: Member | None, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = as_user(guarded, password="not-it-8820")
    told = await refusal(wrong, own)
    assert told.startswith(f"[membership.etcd]: etcd at {guarded.endpoint}")
    assert "invalid user ID or password" in told
    assert "8820" not in told + caplog.text + repr(wrong)


@pytest.mark.parametrize("own", [PE, None], ids=["member", "looks-only"])
async def test_a_user_without_rights_is_told_so_at_the_start(guarded: Etcd, own: Member | None) -> None:
    assert "permission denied" in await refusal(as_user(guarded, "guest", "guest-secret"), own)


@pytest.mark.parametrize("own", [PE, None], ids=["member", "looks-only"])
async def test_who_gives_no_user_where_one_is_needed_is_told_so_at_the_start(guarded: Etcd, own: Member | None) -> None:
    assert "user name is empty" in await refusal(access(guarded.endpoint), own)


async def test_rights_on_the_prefix_are_enough(guarded: Etcd) -> None:
    recorder = Recorder()
    async with joined(as_user(guarded), own=PE, ttl_s=4.0, told=recorder) as membership:
        async with joined(as_user(guarded), own=DE):
            await until(lambda: sorted(membership.nodes()) == ["de", "pe"])
        await until(lambda: membership.nodes() == ["pe"], recorder.told, 1.0)
        assert len(recorder.told) == 3


async def test_users_can_be_switched_on_under_daemons_that_know_theirs(etcd: Etcd) -> None:
    """They have one before etcd asks for it."""
    recorder = Recorder()
    async with cable(etcd.port) as line, joined(as_user(line), own=PE, ttl_s=4.0, told=recorder) as membership:
        assert membership.nodes() == ["pe"]
        switch_on(etcd)
        await asyncio.sleep(SETTLES_S)
        line.cut()
        line.release()
        async with joined(as_user(etcd), own=DE):
            await until(lambda: "de" in membership.nodes(), recorder.told)
        await until(lambda: "de" not in membership.nodes(), recorder.told)
        await asyncio.sleep(SETTLES_S)
        assert [told for told in recorder.told if "pe" in told] == [f"+pe@{PE.address}/{PE.boot_id}"]
        switch_off(etcd)
        line.cut()
        line.release()
        async with joined(as_user(etcd), own=DE):
            await until(lambda: "de" in membership.nodes(), recorder.told)


async def test_users_that_are_switched_on_under_daemons_without_one_leave_them_with_whom_they_know(
    etcd: Etcd, caplog: pytest.LogCaptureFixture
) -> None:
    etcd.ctl("put", KEYS.node("de").decode(), etcd_keys.member_value(DE, "1").decode())
    async with cable(etcd.port) as line, joined(line.endpoint) as membership:
        switch_on(etcd)
        line.cut()
        line.release()
        await until(lambda: membership.silent_s > 0.5)
        assert membership.member("de") == DE
        await until(lambda: "user name is empty" in caplog.text)
        switch_off(etcd)
        await until(lambda: membership.silent_s == 0.0)
        assert membership.member("de") == DE


async def test_tokens_that_etcd_has_forgotten_are_asked_for_anew(guarded: Etcd) -> None:
    recorder = Recorder()
    async with joined(as_user(guarded), own=PE, ttl_s=4.0, told=recorder) as membership:
        await asyncio.to_thread(guarded.restart)
        guarded.ctl("put", KEYS.node("de").decode(), etcd_keys.member_value(DE, "1").decode())
        await until(lambda: "de" in membership.nodes(), recorder.told, 8.0)
        await asyncio.sleep(SETTLES_S)
        assert recorder.told == [f"+pe@{PE.address}/{PE.boot_id}", f"+de@{DE.address}/{DE.boot_id}"]


async def test_rights_that_were_changed_meanwhile_cost_nobody_his_membership(guarded: Etcd) -> None:
    """Every token is void after that, though its user may still do all that he does."""
    recorder = Recorder()
    async with cable(guarded.port) as line, joined(as_user(line), own=PE, ttl_s=4.0, told=recorder) as membership:
        guarded.ctl("role", "grant-permission", "kv", "read", "/elsewhere")
        line.cut()
        line.release()
        guarded.ctl("put", KEYS.node("de").decode(), etcd_keys.member_value(DE, "1").decode())
        await until(lambda: "de" in membership.nodes(), recorder.told)
        await asyncio.sleep(SETTLES_S)
        assert recorder.told == [f"+pe@{PE.address}/{PE.boot_id}", f"+de@{DE.address}/{DE.boot_id}"]


# TLS.


@dataclass(frozen=True)
class Pki:
    home: Path

    def pem(self, name: str) -> bytes:
        return (self.home / name).read_bytes()

    def make(self, name: str, *, ca: str = "", host: str = "") -> None:
        """`name`.pem and `name`.key, signed by `ca`, or by itself."""
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}"]
        files = ["-keyout", str(self.home / f"{name}.key")]
        if not ca:
            made = ["req", "-x509", *curve, *files, "-out", str(self.home / f"{name}.pem")]
            self._openssl(*made, "-addext", "basicConstraints=critical,CA:TRUE")
            return
        self._openssl("req", *curve, *files, "-out", str(self.home / f"{name}.csr"))
        (self.home / f"{name}.ext").write_text(f"subjectAltName={host}\n" if host else "keyUsage=digitalSignature\n")
        signed = ["x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial"]
        self._openssl(*signed, "-extfile", f"{name}.ext", "-out", f"{name}.pem")

    def _openssl(self, *words: str) -> None:
        done = subprocess.run(["openssl", *words], cwd=self.home, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def flags(self, name: str) -> list[str]:
        return [f"--cert-file={self.home / name}.pem", f"--key-file={self.home / name}.key"]


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki(tmp_path_factory.mktemp("pki"))
    made.make("ca")
    made.make("other-ca")
    made.make("etcd", ca="ca", host="DNS:localhost,IP:127.0.0.1")
    made.make("elsewhere", ca="ca", host="DNS:etcd.example")
    made.make("daemon", ca="ca")
    made.make("stranger", ca="other-ca")
    return made


@pytest.fixture(scope="module")
def mutual(pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """It asks clients for certificates, too."""
    more = [*pki.flags("etcd"), f"--trusted-ca-file={pki.home}/ca.pem", "--client-cert-auth"]
    ctl = [f"--cacert={pki.home}/ca.pem", f"--cert={pki.home}/daemon.pem", f"--key={pki.home}/daemon.key"]
    with running(tmp_path_factory.mktemp("etcd"), more, "https", ctl) as made:
        yield made


async def unreachable(how: EtcdAccess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> str:
    """It starts, as it does where there is no etcd; returns what its log says."""
    monkeypatch.setattr(etcd_module, "FIRST_READ_S", 0.3)
    caplog.set_level(logging.WARNING)
    async with joined(how, own=PE) as membership:
        assert membership.nodes() == []
        await until(lambda: membership.silent_s > 0.0)
        return caplog.text


@needs_openssl
async def test_who_shows_his_certificate_to_an_etcd_that_shows_its_own_is_in(mutual: Etcd, pki: Pki) -> None:
    how = access(mutual.endpoint, ca=pki.pem("ca.pem"), cert=pki.pem("daemon.pem"), key=pki.pem("daemon.key"))
    async with joined(how, own=PE) as membership:
        assert membership.nodes() == ["pe"]
        assert PE.boot_id in mutual.ctl("get", KEYS.node("pe").decode())


@needs_openssl
@pytest.mark.parametrize("name", ["", "stranger"])
async def test_who_shows_no_certificate_or_a_strangers_is_not_in(
    mutual: Etcd, pki: Pki, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = (pki.pem(f"{name}.pem"), pki.pem(f"{name}.key")) if name else (b"", b"")
    told = await unreachable(access(mutual.endpoint, ca=pki.pem("ca.pem"), cert=cert, key=key), caplog, monkeypatch)
    assert f"{mutual.endpoint}: UNAVAILABLE" in told


@needs_openssl
async def test_an_etcd_of_another_ca_is_not_trusted(
    mutual: Etcd, pki: Pki, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = access(mutual.endpoint, ca=pki.pem("other-ca.pem"), cert=pki.pem("daemon.pem"), key=pki.pem("daemon.key"))
    assert "CERTIFICATE_VERIFY_FAILED" in await unreachable(how, caplog, monkeypatch)


@needs_openssl
async def test_an_etcd_whose_certificate_is_for_another_host_is_not_trusted(
    pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctl = ["--insecure-skip-tls-verify", "--insecure-transport=false"]
    with running(tmp_path, pki.flags("elsewhere"), "https", ctl) as etcd:
        told = await unreachable(access(etcd.endpoint, ca=pki.pem("ca.pem")), caplog, monkeypatch)
        assert "localhost" in told


@needs_openssl
async def test_without_tls_nothing_is_said_to_an_etcd_that_wants_it(
    mutual: Etcd, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "UNAVAILABLE" in await unreachable(access(mutual.endpoint), caplog, monkeypatch)
    await unreachable(access(mutual.endpoint, user="kv", password=SECRET), caplog, monkeypatch)
    assert SECRET not in caplog.text

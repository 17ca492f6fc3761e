"""Settings of membership, the same for daemons and schedulers: a fixed list of nodes, or etcd."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.core.errors import ConfigError
from kvmoverd.toml_table import Table

KINDS = ("static", "etcd")
ENDPOINTS_MAX = 16
PEM_BYTES_MAX = 1 << 20
PASSWORD_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """Files are read when the process starts; empty paths: none."""

    endpoints: tuple[str, ...]
    prefix: str
    ttl_s: float
    timeout_s: float
    user: str
    password_file: Path | None
    ca: Path | None
    cert: Path | None
    key: Path | None

    def password(self) -> str:
        """Raises `ConfigError`."""
        if self.password_file is None:
            return ""
        try:
            found = _read("password_file", self.password_file, PASSWORD_BYTES_MAX).decode().strip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.password_file} is not UTF-8 at byte {error.start}") from error
        if not found:
            raise ConfigError(f"{self.password_file} has no password in it")
        return found

    def pems(self) -> tuple[bytes, bytes, bytes]:
        """CA, certificate and key, empty where there is none. Raises `ConfigError`."""
        files = {"ca": self.ca, "cert": self.cert, "key": self.key}
        ca, cert, key = [b"" if path is None else _read(name, path, PEM_BYTES_MAX) for name, path in files.items()]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # What can't be used is refused here, by its name: gRPC would only say that it can't connect.
        try:
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{self.ca} holds no certificates in PEM: {error}") from error
        try:
            if self.cert is not None and self.key is not None:
                context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{self.cert} and {self.key} are no certificate and its key in PEM: {error}") from error
        return ca, cert, key


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """`etcd` is None for a static list."""

    kind: str
    etcd: EtcdConfig | None

    def check_files(self) -> None:
        """Raises `ConfigError` for a file that can't be used here and now."""
        if self.etcd is not None:
            self.etcd.password()
            self.etcd.pems()


def membership_config(table: Table, base: Path) -> MembershipConfig:
    """Raises `ConfigError`."""
    kind = table.choice("kind", "static", KINDS)
    etcd = table.table("etcd")
    table.done()
    # Also where it is not used yet: mistakes in it are told before the kind is changed.
    found = _etcd(etcd, base)
    etcd.done()
    if kind == "etcd" and not found.endpoints:
        raise ConfigError(f'{etcd.key("endpoints")} is missing: addresses of etcd, such as ["10.0.0.1:2379"]')
    return MembershipConfig(kind, found if kind == "etcd" else None)


def _etcd(table: Table, base: Path) -> EtcdConfig:
    found = EtcdConfig(
        endpoints=tuple(str(address) for address in table.addresses("endpoints", count_max=ENDPOINTS_MAX)),
        prefix=table.text(
            "prefix",
            "/kvmoverd",
            pattern=r"/[A-Za-z0-9._/-]{0,126}[A-Za-z0-9._-]",
            form="/NAME, without a / at its end",
        ),
        ttl_s=table.duration_s("ttl", 5.0, 2.0, 600.0),
        timeout_s=table.duration_s("timeout", 2.0, 0.1, 60.0),
        user=table.text("user", "", pattern=r"[^\0\n]{0,256}", form="a user of etcd, at most 256 characters"),
        password_file=_file(table, "password_file", base),
        ca=_file(table, "ca", base),
        cert=_file(table, "cert", base),
        key=_file(table, "key", base),
    )
    if bool(found.user) != bool(found.password_file):
        raise ConfigError(f"{table.key('user')} and {table.key('password_file')} go together: one of them is missing")
    if bool(found.cert) != bool(found.key):
        raise ConfigError(f"{table.key('cert')} and {table.key('key')} go together: one of them is missing")
    if found.cert and not found.ca:
        raise ConfigError(
            f"{table.key('ca')} is missing: with {table.key('cert')} etcd's own certificate is checked, too"
        )
    return found


def _file(table: Table, name: str, base: Path) -> Path | None:
    text = table.text(name, "", pattern=r"[^\0]*", form="a path")
    return base / text if text else None


def _no_password() -> str:
    """Else OpenSSL asks whoever sits at the terminal."""
    raise ssl.SSLError("the key is encrypted, which can't be used")


def _read(name: str, path: Path, bytes_max: int) -> bytes:
    """The file of a key of [membership.etcd]. Raises `ConfigError`."""
    key = f"membership.etcd.{name}"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: can't read {path}: {error.strerror}") from error
    if not 0 < len(data) <= bytes_max:
        raise ConfigError(f"{key}: {path} has {len(data)} bytes, must be 1 to {bytes_max}")
    return data

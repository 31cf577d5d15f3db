"""The login server's URL, and the ports ts2021 may be tried on (tailscale: control/ts2021/client.go)."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from urllib.parse import urlsplit

from tsd.base.addr import parse_ip
from tsd.base.errors import ConfigError, DecodeError

_PRIVATE_V4 = tuple(IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8"))
_HOST_MARKS = "-._:%"
_PRIVATE_V6 = (IPv6Network("fc00::/7"), IPv6Network("::1/128"))


@dataclass(frozen=True, slots=True)
class LoginServer:
    """`path` has no trailing slash and is put before `/key` and `/ts2021`. A port of None: not to be tried."""

    scheme: str
    host: str
    port: int
    path: str
    plain_port: int | None
    tls_port: int | None

    @property
    def authority(self) -> str:
        """Host, with the port unless it is the scheme's own."""
        return self.host_header(self.port, is_tls=self.scheme == "https")

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    def host_header(self, port: int, *, is_tls: bool) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return shown if port == (443 if is_tls else 80) else f"{shown}:{port}"


def parse_login_server(text: str) -> LoginServer:
    """Accepts a bare host name as https. Raises `ConfigError` naming what is wrong."""
    cleaned = text.strip()
    try:
        split = urlsplit(cleaned if "://" in cleaned else f"https://{cleaned}")
    except ValueError as err:
        raise ConfigError(f"login server {text!r}: {err}") from None
    scheme = split.scheme.lower()
    if scheme not in ("http", "https"):
        raise ConfigError(f"login server {text!r}: the URL must begin with https:// or http://")
    if not split.hostname:
        raise ConfigError(f"login server {text!r}: there is no host name in it")
    if split.username is not None or split.query or split.fragment:
        raise ConfigError(f"login server {text!r}: user, query and fragment have no meaning here; remove them")
    try:
        port = split.port
    except ValueError:
        raise ConfigError(f"login server {text!r}: the port is not a number up to 65535") from None
    host = split.hostname.rstrip(".")
    if not host or not all(char.isalnum() or char in _HOST_MARKS for char in host):
        raise ConfigError(f"login server {text!r}: {host!r} is not a host name")
    if not all(char.isprintable() and not char.isspace() for char in split.path):
        raise ConfigError(f"login server {text!r}: the path has blanks or control characters in it")
    plain, tls = _ports(scheme, host, port)
    path = split.path.rstrip("/")
    return LoginServer(scheme, host, port or (443 if scheme == "https" else 80), path, plain, tls)


def _ports(scheme: str, host: str, port: int | None) -> tuple[int | None, int | None]:
    if scheme == "https":
        return 80, port or 443
    return port or 80, None if is_private_host(host) else 443


def is_private_host(host: str) -> bool:
    """Where plain HTTP is not worth backing up by TLS: localhost, loopback, RFC 1918 and ULA literals."""
    if host.lower() == "localhost":
        return True
    try:
        ip = parse_ip(host)
    except DecodeError:
        return False
    return any(ip in network for network in (_PRIVATE_V4 if ip.version == 4 else _PRIVATE_V6))

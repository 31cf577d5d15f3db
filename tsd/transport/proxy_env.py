"""Proxy settings from the environment, for control and DERP alike (Go: golang.org/x/net/http/httpproxy).

HTTPS_PROXY, HTTP_PROXY and NO_PROXY, upper or lower case. Only `http://` proxies are spoken; a SOCKS or TLS proxy is
refused in words instead of being half used. Loopback is never proxied.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from tsd.base.addr import parse_ip, parse_number, parse_prefix
from tsd.base.errors import ConfigError, DecodeError


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy; `authorization` is the value of Proxy-Authorization, or empty."""

    host: str
    port: int
    authorization: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ProxySettings:
    https_proxy: str = ""
    http_proxy: str = ""
    no_proxy: tuple[str, ...] = ()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> ProxySettings:
        def value(name: str) -> str:
            return (environ.get(name) or environ.get(name.lower()) or "").strip()

        exceptions = tuple(part.strip().lower() for part in value("NO_PROXY").split(",") if part.strip())
        return cls(value("HTTPS_PROXY"), value("HTTP_PROXY"), exceptions)

    def check(self) -> None:
        """Raises `ConfigError` for a proxy that cannot be used; meant for start-up."""
        for name, text in (("HTTPS_PROXY", self.https_proxy), ("HTTP_PROXY", self.http_proxy)):
            if text:
                _parse(name, text)

    def proxy_for(self, host: str, port: int, *, is_tls: bool) -> Proxy | None:
        """Raises `ConfigError`."""
        name, text = ("HTTPS_PROXY", self.https_proxy) if is_tls else ("HTTP_PROXY", self.http_proxy)
        if not text or is_loopback(host) or self._is_excepted(host.lower(), port):
            return None
        return _parse(name, text)

    def _is_excepted(self, host: str, port: int) -> bool:
        return any(_matches(rule, host, port) for rule in self.no_proxy)


def is_loopback(host: str) -> bool:
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return parse_ip(host).is_loopback
    except DecodeError:
        return False


def _parse(name: str, text: str) -> Proxy:
    try:
        split = urlsplit(text if "://" in text else f"http://{text}")
    except ValueError as err:
        raise ConfigError(f"{name} is not a proxy address: {text!r} ({err})") from None
    if split.scheme != "http":
        raise ConfigError(
            f"{name}={split.scheme}://… is not supported: only http:// proxies are; unset it or name an HTTP proxy"
        )
    try:
        port = split.port or 80
    except ValueError:
        port = 0
    if not split.hostname or not port:
        raise ConfigError(f"{name} is not a proxy address: {text!r}")
    authorization = ""
    if split.username is not None:
        pair = f"{unquote(split.username)}:{unquote(split.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    return Proxy(split.hostname, port, authorization)


def _matches(rule: str, host: str, port: int) -> bool:
    if rule == "*":
        return True
    name, colon, wanted_port = rule.rpartition(":")
    if colon and wanted_port.isdecimal() and ":" not in name:
        rule = name
        if parse_number(wanted_port, 65535) != port:
            return False
    try:
        return parse_ip(host) in parse_prefix(rule)
    except DecodeError:
        pass
    domain = rule.lstrip("*").lstrip(".")
    return host == domain or host.endswith("." + domain)

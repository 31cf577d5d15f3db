"""The hull that needs no rights: netstack instead of a TUN device, no routes, no resolver changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsd.base.addr import AddrPort, parse_ip
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy, system_entropy
from tsd.base.errors import DecodeError
from tsd.hull import DnsConfig, Hull, LinkMonitor, RouterConfig, StateStore, Underlay
from tsplatform.links import LinkWatcher
from tsplatform.underlay import HostUnderlay
from tsplatform.userspace.tun import NetstackTun


class NetstackRouter:
    """The host's routing stays as it is; the stack learns which addresses are ours and what we forward."""

    def __init__(self, tun: NetstackTun) -> None:
        self._tun = tun

    def apply(self, config: RouterConfig) -> None:
        self._tun.set_addresses([prefix.network_address for prefix in config.local_addresses])
        self._tun.set_subnets(config.subnet_routes)

    def revert(self) -> None:
        self.apply(RouterConfig())


class HostDns:
    """The host's names stay as they are; only its upstream resolvers are read."""

    def __init__(self, path: Path = Path("/etc/resolv.conf")) -> None:
        self._path = path

    def apply(self, config: DnsConfig) -> None:
        """Nothing to do: only our proxies and the LocalAPI resolve overlay names."""

    def revert(self) -> None:
        """Nothing was done."""

    def base_resolvers(self) -> list[str]:
        try:
            lines = self._path.read_text("utf-8", "replace").splitlines()
        except OSError:
            return []
        found = [words[1] for words in (line.split() for line in lines) if len(words) > 1 and words[0] == "nameserver"]
        return [text for text in found if _is_address(text)]

    def describe(self) -> dict[str, Any]:
        return {"Mode": "none", "Because": ["userspace networking: the host's resolver cannot reach tsd's"]}


def _is_address(text: str) -> bool:
    try:
        parse_ip(text)
    except DecodeError:
        return False
    return True


@dataclass(slots=True)
class UserspaceHull(Hull):
    """A `Hull` that knows who is behind its sockets."""

    stack: NetstackTun

    def proxy_origin(self, proto: str, host: AddrPort) -> AddrPort | None:
        return self.stack.proxy_origin(proto, host)


def build_userspace_hull(
    store: StateStore,
    *,
    links: LinkMonitor | None = None,
    underlay: Underlay | None = None,
    mtu_bytes: int = 1280,
    entropy: Entropy = system_entropy,
    clock: Clock | None = None,
) -> UserspaceHull:
    watcher = links if links is not None else LinkWatcher()
    below = underlay if underlay is not None else HostUnderlay(watcher)
    tun = NetstackTun(mtu_bytes=mtu_bytes, entropy=entropy, clock=clock, protect=below.protect)
    return UserspaceHull("userspace", tun, tun, NetstackRouter(tun), HostDns(), store, watcher, below, tun)

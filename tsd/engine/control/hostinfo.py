"""What we tell control about this host (tailscale: hostinfo/hostinfo.go)."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from tsd.base.addr import IPAddress
from tsd.base.keys import MachinePublic
from tsd.derp import bundle
from tsd.engine.account.prefs import Prefs
from tsd.engine.control.requests import SelfReport
from tsd.engine.peers import MTU_SERVICE, USUAL_MTU_BYTES
from tsd.tailcfg.hostinfo import Hostinfo, NetInfo, Service

if TYPE_CHECKING:
    from tsd.engine.engine import Engine

GO_ARCH = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
OS_NAMES = {"Linux": "linux", "Darwin": "macOS", "Windows": "windows", "FreeBSD": "freebsd"}


class HostFacts(Struct, frozen=True):
    """Facts that do not change while we run."""

    os: str
    os_version: str
    hostname: str
    machine: str
    distro: str = ""
    distro_version: str = ""
    distro_code_name: str = ""
    is_container: bool = False

    @classmethod
    def read(cls) -> HostFacts:
        system = os.uname()
        release = _os_release()
        return cls(
            os=OS_NAMES.get(system.sysname, system.sysname.lower()),
            os_version=system.release,
            hostname=_text(socket.gethostname()),
            machine=system.machine,
            distro=release.get("ID", ""),
            distro_version=release.get("VERSION_ID", ""),
            distro_code_name=release.get("VERSION_CODENAME", ""),
            is_container=_in_container(),
        )


def _text(name: str) -> str:
    """A kernel takes any bytes as a host name; JSON does not."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name: value.strip("\"'") for name, _, value in pairs}


def _in_container() -> bool:
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return True
    try:
        return any(word in Path("/proc/1/cgroup").read_text() for word in ("/docker/", "/lxc/", "/kubepods"))
    except OSError:
        return False


def log_id(machine: MachinePublic) -> str:
    """A stable public ID in the form that control expects; nothing is ever uploaded under it."""
    return hashlib.sha256(b"tsd log id\0" + machine.raw).hexdigest()


def build(
    facts: HostFacts,
    prefs: Prefs,
    machine: MachinePublic,
    version: str,
    *,
    is_userspace: bool,
    peerapi_ports: Mapping[IPAddress, int],
    net_info: NetInfo | None,
    mtu_bytes: int = USUAL_MTU_BYTES,
) -> Hostinfo:
    """The Hostinfo in force: facts of the host, the user's wishes, and where our PeerAPI listens."""
    services = tuple(Service(proto=f"peerapi{ip.version}", port=port) for ip, port in peerapi_ports.items())
    if mtu_bytes != USUAL_MTU_BYTES:
        services = (*services, Service(proto=MTU_SERVICE, port=mtu_bytes))
    return Hostinfo(
        ipn_version=version,
        backend_log_id=log_id(machine),
        os=facts.os,
        os_version=facts.os_version,
        container=facts.is_container,
        distro=facts.distro,
        distro_version=facts.distro_version,
        distro_code_name=facts.distro_code_name,
        desktop=False,
        hostname=prefs.hostname or facts.hostname,
        shields_up=prefs.shields_up,
        no_logs_no_support=True,
        machine=facts.machine,
        go_arch=GO_ARCH.get(facts.machine, facts.machine),
        routable_ips=tuple(str(p) for p in sorted(prefs.advertise_routes, key=_prefix_order)) or None,
        request_tags=tuple(sorted(prefs.advertise_tags)) or None,
        services=(*services, Service(proto="peerapi-dns-proxy", port=1), Service(proto=bundle.SERVICE, port=1)),
        net_info=net_info,
        userspace=is_userspace,
        userspace_router=is_userspace,
    )


def self_report(engine: Engine) -> SelfReport:
    """All that the server should know about us now."""
    reach = engine.reach
    info = build(
        engine.facts,
        engine.account.prefs,
        engine.profiles.machine_key().public(),
        engine.options.version,
        is_userspace=engine.options.hull.tun.is_userspace,
        peerapi_ports=engine.peerapi.ports,
        net_info=reach.net_info if reach.home else None,
        mtu_bytes=engine.options.hull.tun.mtu_bytes,
    )
    endpoints = tuple((str(e.address), int(e.kind)) for e in reach.endpoints)
    return SelfReport(info, engine.disco_private.public(), endpoints, tka_head=engine.lock.head_text)


def _prefix_order(prefix: object) -> tuple[int, int, str]:
    return getattr(prefix, "version", 0), getattr(prefix, "prefixlen", 0), str(prefix)

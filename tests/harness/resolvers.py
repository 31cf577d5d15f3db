"""Real resolvers for tests: dnsmasq and unbound as upstreams, systemd-resolved with a bus of its own in a box."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.debs import unpacked
from harness.hostbox import HostBox
from harness.netlab import NetLab, Process, wait_for

BUS_SOCKET = "/run/dbus/system_bus_socket"
BUS_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>system</type><listen>unix:path={}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow user="*"/><allow own="*"/>
<allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/></policy></busconfig>
"""
"""Of a bus that lets everybody do everything; the path of its socket is missing."""
_USER = 994
PROGRAMS = "/usr/sbin:/sbin:/usr/bin:/bin"


def needed(program: str) -> str:
    found = shutil.which(program, path=PROGRAMS)
    if found is None:
        pytest.skip(f"{program} is not installed")
    return found


def dnsmasq(lab: NetLab, namespace: str, folder: Path, lines: list[str]) -> Process:
    """Answers for what `lines` say, and refuses the rest."""
    config = folder / "dnsmasq.conf"
    config.write_text("\n".join(["no-resolv", "no-hosts", "user=root", "log-queries", "edns-packet-max=1232", *lines]))
    words = [needed("dnsmasq"), "-k", "-C", str(config), "--log-facility=-"]
    return _listening(lab.start(namespace, words, folder / "dnsmasq.log"))


def unbound(lab: NetLab, namespace: str, folder: Path, listen: str, zone: str, records: list[str]) -> Process:
    """Authoritative for one zone."""
    data = "\n".join(f"  local-data: '{record}'" for record in records)
    config = folder / "unbound.conf"
    config.write_text(
        f"server:\n  interface: {listen}\n  access-control: 0.0.0.0/0 allow\n  do-daemonize: no\n  username: ''\n"
        f"  chroot: ''\n  pidfile: ''\n  use-syslog: no\n  log-queries: yes\n  directory: '{folder}'\n"
        f"  module-config: 'iterator'\n  local-zone: '{zone}.' static\n{data}\nremote-control:\n  control-enable: no\n"
    )
    program, environ = _unbound()
    return _listening(lab.start(namespace, [program, "-d", "-c", str(config)], folder / "unbound.log", environ))


def _unbound() -> tuple[str, dict[str, str]]:
    """Installed it would serve this machine."""
    found = shutil.which("unbound", path=PROGRAMS)
    if found is not None:
        return found, {}
    folders = [unpacked(name) for name in ("libevent-2.1-7", "libprotobuf-c1", "libpython3.11", "libnghttp2-14")]
    libraries = [str(path) for folder in folders for path in folder.glob("usr/lib/*-linux-gnu")]
    return str(unpacked("unbound") / "usr/sbin/unbound"), {"LD_LIBRARY_PATH": ":".join(libraries)}


def _listening(process: Process) -> Process:
    def is_up() -> bool:
        if not process.is_running:
            raise RuntimeError(process.tail())
        return "start" in process.log.read_text(errors="replace")

    wait_for(is_up, 20, f"{process.log.name}")
    return process


class Resolved:
    """systemd-resolved without systemd, beside a bus that lets everybody in."""

    def __init__(self, box: HostBox, upstream: str) -> None:
        self.box = box
        needed("dbus-daemon")
        etc = box.folder / "etc"
        (etc / "bus.conf").write_text(BUS_CONFIG.format(BUS_SOCKET))
        for name, line in (("passwd", f"systemd-resolve:x:{_USER}:{_USER}::/:/usr/sbin/nologin\n"),
                           ("group", f"systemd-resolve:x:{_USER}:\n")):  # fmt: skip
            with (etc / name).open("a") as file:
                file.write(line)
        (etc / "systemd").mkdir(exist_ok=True)
        (etc / "systemd" / "resolved.conf").write_text(
            f"[Resolve]\nDNS={upstream}\nFallbackDNS=\nDomains=lan\nLLMNR=no\nMulticastDNS=no\n"
        )
        box.run("install", "-d", "-o", str(_USER), "-g", str(_USER), "/run/systemd/resolve")
        box.run("ln", "-sf", "../run/systemd/resolve/stub-resolv.conf", "/etc/resolv.conf")
        self.bus = box.start("dbus-daemon", "--config-file=/etc/bus.conf", "--nofork", log="bus.log")
        wait_for(lambda: self._has(BUS_SOCKET), 20, "the bus")
        self.process: Process | None = None

    def start(self) -> None:
        environ = {"LD_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu/systemd:/usr/lib/aarch64-linux-gnu/systemd"}
        self.process = self.box.start("/usr/lib/systemd/systemd-resolved", log="resolved.log", environ=environ)
        wait_for(lambda: self._has("/run/systemd/resolve/stub-resolv.conf"), 20, "systemd-resolved")

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = None

    def _has(self, path: str) -> bool:
        return self.box.run("sh", "-c", f"test -e {path} && echo yes", check=False).strip() == "yes"

    def control(self, *words: str, check: bool = True) -> str:
        return self.box.run("resolvectl", "--no-pager", *words, check=check)

"""The real .deb under a real systemd: `make test-systemd`. A Debian root is booted in namespaces, with no way out.

Minutes when the root is made anew, less than one when it is in the cache; skipped loudly where it cannot be made.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from harness.debianroot import BootedRoot, CannotMake
from harness.debs import archive
from harness.nodes import ROOT
from harness.packagesite import copy_site

pytestmark = [pytest.mark.root, pytest.mark.soak, pytest.mark.timeout(1500)]
COORD = (
    "tsd coord --state=/var/lib/coord --listen=127.0.0.1:8080 --derp-listen=127.0.0.1:3340 --stun-listen=127.0.0.1:3478"
)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedRoot]:
    folder = tmp_path_factory.mktemp("systemd")
    copy_site(folder / "site")
    build = [sys.executable, str(ROOT / "packaging/build_packages.py"), "--fast", "--only=deb"]
    build += [f"--site={folder}/site", f"--out={folder}/out"]
    subprocess.run(build, check=True, timeout=300)
    subprocess.run([*build, "--version=9.0"], check=True, timeout=300)
    root = BootedRoot(folder / "root")
    packages = folder / "root" / "upper" / "opt"
    packages.mkdir(parents=True)
    for path in (folder / "out").iterdir():
        shutil.move(path, packages / ("newer.deb" if "9.0" in path.name else "tsd.deb"))
    for package in RESOLVCONFS:
        with contextlib.suppress(pytest.skip.Exception):
            shutil.copy(archive(package), packages / f"{package}.deb")
    try:
        yield root.boot()
    except CannotMake as why:
        pytest.skip(f"NO SYSTEMD HERE: {why}")
    finally:
        root.close()
        subprocess.run(["rm", "-rf", str(folder)], check=False)


def _show(box: BootedRoot, what: str) -> str:
    return box.run("systemctl", "show", "tsd", f"--property={what}", "--value").strip()


def _wait(box: BootedRoot, condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            journal = box.run("journalctl", "-u", "tsd", "--no-pager", "-n", "60", check=False)
            raise TimeoutError(f"{what}\n{box.run('systemctl', 'status', 'tsd', check=False)}\n{journal}")
        time.sleep(0.3)


def _is_connected(box: BootedRoot) -> bool:
    return _show(box, "StatusText").startswith("Connected; ")


def test_1_install_starts_the_service(box: BootedRoot) -> None:
    box.run("dpkg", "--force-unsafe-io", "-i", "/opt/tsd.deb")
    box.run("systemctl", "start", "tsd")
    assert _show(box, "ActiveState") == "active" and _show(box, "UnitFileState") == "enabled"
    _wait(box, lambda: "Needs login" in _show(box, "StatusText"), "the status text")
    assert "data path: native" in box.run("tsd", "--version")
    said = box.run("systemd-analyze", "security", "tsd", "--no-pager")
    assert float(re.findall(r"Overall exposure level for tsd\.service: ([\d.]+)", said)[0]) <= 3.0


def test_2_up_and_status(box: BootedRoot) -> None:
    box.run("systemd-run", "--quiet", "--unit=coord", *COORD.split())
    _wait(box, lambda: box.run("tsd", "coord", "status", "--state=/var/lib/coord", check=False).count("8080"), "coord")
    key = re.findall(r"tskey-\S+", box.run("tsd", "coord", "keys", "create", "--state=/var/lib/coord", "--reusable"))[0]
    box.run("tsctl", "up", "--login-server=http://127.0.0.1:8080", f"--auth-key={key}", "--timeout=60s")
    _wait(box, lambda: _is_connected(box), "Connected in systemctl status")
    assert "100.64.0.1" in box.run("systemctl", "--no-pager", "status", "tsd")
    assert "100.64.0.1/32" in box.run("ip", "addr", "show", "tsd0")
    _wait(
        box, lambda: "All is well" in box.run("tsctl", "doctor", check=False), box.run("tsctl", "doctor", check=False)
    )


def test_3_reload_and_the_journal(box: BootedRoot) -> None:
    box.run("systemctl", "reload", "tsd")
    _wait(box, lambda: "configuration reloaded" in box.run("journalctl", "-u", "tsd", "--no-pager"), "the reload")
    assert _show(box, "ActiveState") == "active"
    fields = box.run("journalctl", "-u", "tsd", "-o", "verbose", "--no-pager", "-g", "configuration reloaded")
    assert "PRIORITY=6" in fields and "MESSAGE=tsd." in fields, fields


def test_4_a_hung_daemon_is_ended_and_comes_back_as_the_same_node(box: BootedRoot) -> None:
    folder = "/etc/systemd/system/tsd.service.d"
    drop_in = f"mkdir -p {folder} && printf '[Service]\\nWatchdogSec=6\\n' >{folder}/watchdog.conf"
    box.run("sh", "-c", f"{drop_in} && systemctl daemon-reload && systemctl restart tsd")
    _wait(box, lambda: _is_connected(box), "connected after the restart")
    pid = _show(box, "MainPID")
    box.run("kill", "-STOP", pid)
    _wait(box, lambda: _show(box, "NRestarts") == "1", "the watchdog", 90)
    _wait(box, lambda: _is_connected(box), "connected after the watchdog")
    assert _show(box, "MainPID") != pid and "100.64.0.1" in box.run("tsctl", "ip")


def test_5_stop_leaves_nothing(box: BootedRoot) -> None:
    box.run("systemctl", "stop", "tsd")
    assert "tsd0" not in box.run("ip", "addr") and "lookup 53" not in box.run("ip", "rule")
    assert box.run("nft", "list", "ruleset").strip() == ""
    assert "100.100.100.100" not in box.run("cat", "/etc/resolv.conf", check=False)
    assert "status=0/SUCCESS" in box.run("systemctl", "--no-pager", "status", "tsd", check=False)


HOOK = "#!/bin/sh\numask 077\ntouch /var/lib/hooked && chown nobody /var/lib/hooked && mkdir -p /run/hooked\n"
"""What hooks of other packages do: write below /var, make folders below /run, give files away."""
MODES = {"openresolv": '"openresolv"', "resolvconf": '"debian-resolvconf"'}
RESOLVCONFS = {"openresolv": "/lib/resolvconf/libc.d/zz-test", "resolvconf": "/etc/resolvconf/update-libc.d/zz-test"}


@pytest.mark.parametrize("package", RESOLVCONFS)
def test_6_names_by_resolvconf_and_the_hooks_of_others(box: BootedRoot, package: str) -> None:
    """The sandbox of our unit is not theirs, and what they make is for every user."""
    if f"{package}.deb" not in box.run("ls", "/opt"):
        pytest.skip(f"{package} cannot be fetched")
    box.run("rm", "-rf", "/etc/resolv.conf", "/var/lib/hooked", "/run/hooked")
    box.run("dpkg", "--force-depends", "--force-unsafe-io", "-i", f"/opt/{package}.deb")
    hook = RESOLVCONFS[package]
    box.run("sh", "-ec", f"mkdir -p $(dirname {hook}); printf '%s' '{HOOK}' >{hook}; chmod +x {hook}")
    if package == "resolvconf":
        box.run("sh", "-ec", "ln -sf /run/resolvconf/resolv.conf /etc/resolv.conf; resolvconf --enable-updates")
    box.run("sh", "-ec", "echo nameserver 192.0.2.53 | resolvconf -a eth0.test")
    if package == "openresolv":  # as after a boot, when nobody else has called it yet
        box.run("rm", "-rf", "/run/resolvconf")
    box.run("rm", "-rf", "/var/lib/hooked", "/run/hooked")
    box.run("systemctl", "start", "tsd")
    _wait(box, lambda: "100.100.100.100" in box.run("cat", "/etc/resolv.conf", check=False), "our names")
    assert MODES[package] in box.run("tsctl", "dns", "status", "--json")
    assert box.run("stat", "-L", "-c", "%a", "/etc/resolv.conf").strip() == "644"
    assert "100.100.100.100" in box.run("setpriv", "--reuid=65534", "--clear-groups", "cat", "/etc/resolv.conf")
    assert box.run("stat", "-c", "%U", "/var/lib/hooked").strip() == "nobody"
    box.run("ls", "-d", "/run/hooked")
    box.run("rm", "-rf", "/var/lib/hooked")
    box.run("systemctl", "stop", "tsd")
    assert "100.100.100.100" not in box.run("cat", "/etc/resolv.conf", check=False)
    box.run("ls", "/var/lib/hooked")
    box.run("dpkg", "--force-depends", "--purge", package)


def test_7_upgrade_removal_and_purge(box: BootedRoot) -> None:
    box.run("sh", "-c", "echo 'FLAGS=\"--verbose=1\"' >>/etc/default/tsd && systemctl start tsd")
    _wait(box, lambda: _is_connected(box), "connected")
    pid = _show(box, "MainPID")
    box.run("dpkg", "--force-unsafe-io", "-i", "/opt/newer.deb")
    _wait(box, lambda: _show(box, "MainPID") != pid and _is_connected(box), "restarted by the upgrade")
    assert "100.64.0.1" in box.run("tsctl", "ip") and "--verbose=1" in box.run("cat", "/etc/default/tsd")
    box.run("dpkg", "-r", "tsd")
    assert "tsd0" not in box.run("ip", "addr") and "tsd.state" in box.run("ls", "/var/lib/tsd")
    box.run("dpkg", "--force-unsafe-io", "-i", "/opt/newer.deb")
    _wait(box, lambda: _is_connected(box), "connected after the removal")
    assert "100.64.0.1" in box.run("tsctl", "ip"), "the identity was lost"
    box.run("dpkg", "--purge", "tsd")
    for path in ("/var/lib/tsd", "/etc/default/tsd", "/usr/lib/tsd", "/run/tsd"):
        assert "No such file" in box.run("ls", path, check=False), path

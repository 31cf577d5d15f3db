"""The systemd unit and the launchd plist: they parse, name our files, and keep the daemon in a tight sandbox."""

import configparser
import plistlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tsd.daemon.flags import parse
from tsplatform.linux.dns.tools import OUTSIDE
from tsplatform.linux.hostnames import CLAIMS

ROOT = Path(__file__).resolve().parents[3]
UNIT = ROOT / "packaging" / "systemd" / "tsd.service"
DEFAULTS = ROOT / "packaging" / "systemd" / "tsd.defaults"
PLIST = ROOT / "packaging" / "launchd" / "net.tsd.tsd.plist"


class _Unit(configparser.ConfigParser):
    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture
def service() -> dict[str, str]:
    parser = _Unit(interpolation=None, strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.read(UNIT)
    return dict(parser["Service"])


def test_the_unit_waits_for_ready_and_cleans_up(service: dict[str, str]) -> None:
    assert service["Type"] == "notify"
    assert service["RuntimeDirectory"] == service["StateDirectory"] == service["CacheDirectory"] == "tsd"
    assert "--cleanup" in service["ExecStopPost"]
    assert service["Restart"] == "on-failure"


def test_hooks_of_other_packages_are_run_outside_of_the_sandbox() -> None:
    assert f"\nEnvironment={OUTSIDE}=1\n" in UNIT.read_text()


def test_what_the_sandbox_lets_be_written_is_there_or_may_be_missing(service: dict[str, str]) -> None:
    lock = "/run/xtables.lock"
    assert f"-{lock}" in service["ReadWritePaths"].split()
    assert f"\nExecStartPre=+-/usr/bin/touch {lock}\n" in UNIT.read_text() and service["UMask"] == "0077"
    assert f"-{CLAIMS}" in service["ReadWritePaths"].split()
    assert service["ExecStartPre"] == f"+-/usr/bin/mkdir -p -m 0700 {CLAIMS}"
    assert CLAIMS.parent == Path("/run") and CLAIMS.name != service["RuntimeDirectory"]


@pytest.mark.parametrize("key", ["ExecStart", "ExecStopPost"])
def test_the_daemon_takes_the_flags_of_the_unit(service: dict[str, str], key: str) -> None:
    words = service[key].replace("${PORT}", "0").replace("$FLAGS", "--verbose=1").split()[1:]
    settings = parse(words, {})
    assert settings.state == "/var/lib/tsd/tsd.state"
    assert settings.socket == "/run/tsd/tsd.sock"


def test_the_defaults_are_shell_assignments() -> None:
    lines = [line for line in DEFAULTS.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ['PORT="0"', 'FLAGS=""']


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_sandbox_is_tight() -> None:
    command = ["systemd-analyze", "security", "--offline=true", str(UNIT)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"Overall exposure level for tsd\.service: ([\d.]+)", out)
    assert found is not None, out
    assert float(found.group(1)) <= 3.0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_knows_every_directive(tmp_path: Path) -> None:
    program = tmp_path / "tsd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "tsd.service"
    unit.write_text(UNIT.read_text().replace("/usr/bin/tsd", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert [line for line in done.stderr.splitlines() if "tsd.service" in line] == []


def test_the_plist_keeps_the_daemon_alive_and_logs() -> None:
    plist = plistlib.loads(PLIST.read_bytes())
    assert PLIST.stem == plist["Label"]
    assert plist["RunAtLoad"] is True
    assert plist["KeepAlive"] == {"SuccessfulExit": False}
    assert plist["StandardErrorPath"].startswith("/Library/Logs/")
    settings = parse(plist["ProgramArguments"][1:], {})
    assert settings.tun == "userspace-networking" and settings.state.endswith("/tsd.state")

"""The .deb and the .rpm: contents, and what install, upgrade, removal and purge do, in a root of their own.

The root is an overlay over this machine's, thrown away afterwards; systemd does not run in it (tests/systemd has one).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "packaging" / "build_packages.py"
SCRIPTS = ROOT / "packaging" / "scripts"
SITE = {
    # What the package carries does not matter here: tests/systemd installs the real thing.
    "tsd/__init__.py": "",
    "tsd/daemon/__init__.py": "",
    "tsd/daemon/cli.py": "import sys\ndef main():\n    print('ran', sys.path[0], sys.flags.isolated)\n",
    "tsd/_fast.pyx": "",
    "tsctl/__init__.py": "def main() -> int:\n    return 3\n",
    "bin/leftover": "",
}
pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg")
needs_rpm = pytest.mark.skipif(shutil.which("rpmbuild") is None, reason="needs rpm: apt-get install rpm")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By "deb", "rpm" and "newer deb"."""
    folder = tmp_path_factory.mktemp("packages")
    for name, text in SITE.items():
        (folder / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "site" / name).write_text(text)
    run = [sys.executable, str(BUILD), "--fast", f"--site={folder}/site", f"--out={folder}/out"]
    subprocess.run(run, check=True, timeout=200)
    subprocess.run([*run, "--only=deb", "--version=9.0"], check=True, timeout=200)
    found = {path.suffix[1:]: path for path in (folder / "out").iterdir() if "9.0" not in path.name}
    newer = next((folder / "out").glob("*9.0*"), None)
    return found | ({"newer deb": newer} if newer is not None else {})


class Root:
    """Commands run in a copy-on-write view of this machine's root folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.upper = folder / "upper"
        for name in ("upper", "work", "merged"):
            (folder / name).mkdir(parents=True)

    def sh(self, script: str) -> str:
        layers = f"lowerdir=/,upperdir={self.upper},workdir={self.folder}/work"
        enter = (
            f"mount -t overlay overlay -o {layers} {self.folder}/merged"
            f" && mount -t proc proc {self.folder}/merged/proc && exec chroot {self.folder}/merged /bin/sh -ec"
        )
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "HOME": "/root"}
        done = subprocess.run(
            ["unshare", "-m", "-n", "sh", "-c", f'{enter} "$1"', "sh", script],
            capture_output=True, text=True, env=env, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def has(self, path: str) -> bool:
        """Made here, and not removed again (overlayfs marks that by a device node)."""
        return (self.upper / path).exists() and not (self.upper / path).is_char_device()

    def put(self, source: Path, place: str) -> None:
        target = self.upper / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    # Not below tmp_path: the lower layer of an overlay must not contain its upper one's mount point twice.
    made = Root(tmp_path / "r")
    try:
        made.sh("true")
    except AssertionError as err:
        pytest.skip(f"no overlay over this machine's root: {err}")
    yield made
    subprocess.run(["rm", "-rf", str(made.folder)], check=False)


@needs_dpkg
def test_the_deb_from_install_to_purge(packages: dict[str, Path], root: Root) -> None:
    for name in ("deb", "newer deb"):
        root.put(packages[name], f"opt/{name.replace(' ', '-')}.deb")
    install = "dpkg --force-depends -i"  # this machine's python3.11 may not be Debian's
    root.sh(f"{install} /opt/deb.deb")
    for path in ("usr/bin/tsd", "usr/bin/tsctl", "etc/default/tsd", "usr/lib/tsd/tsd/daemon/cli.py"):
        assert root.has(path), path
    root.sh("mkdir -p /var/lib/tsd && echo identity >/var/lib/tsd/tsd.state && echo 'PORT=\"7\"' >/etc/default/tsd")
    root.sh(f"{install} /opt/newer-deb.deb")
    assert "9.0" in root.sh("dpkg-query -W tsd")
    assert (root.upper / "etc/default/tsd").read_text() == 'PORT="7"\n'
    root.sh("dpkg -r tsd")
    assert not root.has("usr/bin/tsd") and not root.has("usr/lib/tsd/tsd")
    assert (root.upper / "var/lib/tsd/tsd.state").read_text() == "identity\n"
    assert root.has("etc/default/tsd")
    root.sh(f"{install} /opt/deb.deb && dpkg -P tsd")
    assert not root.has("var/lib/tsd") and not root.has("etc/default/tsd") and not root.has("usr/lib/tsd")


@needs_dpkg
@pytest.mark.skipif(not os.access("/usr/bin/python3.11", os.X_OK), reason="needs Debian's /usr/bin/python3.11")
def test_the_commands_of_the_deb_run(packages: dict[str, Path], root: Root) -> None:
    root.put(packages["deb"], "opt/tsd.deb")
    root.sh("dpkg --force-depends -i /opt/tsd.deb")
    said = root.sh("mkdir -p /opt/tsd && cd /opt && PYTHONPATH=/opt tsd --version; tsctl || echo code $?")
    assert "ran /usr/lib/tsd 1" in said and "code 3" in said


@needs_dpkg
def test_the_deb_says_what_it_needs(packages: dict[str, Path]) -> None:
    said = subprocess.run(["dpkg-deb", "-I", packages["deb"]], capture_output=True, text=True, check=True).stdout
    assert f"Depends: python{sys.version_info.major}.{sys.version_info.minor}, libc6 (>= 2." in said
    assert "Recommends: nftables" in said
    listed = subprocess.run(["dpkg-deb", "-c", packages["deb"]], capture_output=True, text=True, check=True).stdout
    assert "./lib/systemd/system/tsd.service" in listed and "./usr/share/doc/tsd/openrc/tsd" in listed
    assert "leftover" not in listed and ".pyx" not in listed and "root/root" in listed
    assert "__pycache__/cli.cpython" in listed


@needs_rpm
def test_the_rpm_keeps_settings_and_identity(packages: dict[str, Path], root: Root) -> None:
    package = packages["rpm"]
    ask = ["rpm", "-qp", "--nosignature"]
    said = subprocess.run([*ask, "-lcR", package], capture_output=True, text=True, check=True).stdout
    assert "/etc/default/tsd" in said and f"/usr/bin/python3.{sys.version_info.minor}" in said
    files = subprocess.run([*ask, "-l", package], capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"/usr/bin/tsd", "/usr/bin/tsctl", "/usr/lib/systemd/system/tsd.service"} <= set(files)
    root.put(package, "opt/tsd.rpm")
    root.sh("rpm -i --nodeps --nosignature /opt/tsd.rpm")
    assert root.has("usr/bin/tsd")
    root.sh("mkdir -p /var/lib/tsd && echo identity >/var/lib/tsd/tsd.state && rpm -e tsd")
    assert not root.has("usr/bin/tsd") and root.has("var/lib/tsd/tsd.state")


def test_both_packages_come_from_the_same_scripts() -> None:
    for path in SCRIPTS.glob("*.sh"):
        text = path.read_text()
        subprocess.run(["sh", "-n"], input=f"action=x\n{text}", text=True, check=True)
        assert "$action" in text
    assert "/var/lib/tsd" in (SCRIPTS / "after-remove.sh").read_text()


def test_the_openrc_script_is_a_script_and_uses_our_flags() -> None:
    path = ROOT / "packaging" / "openrc" / "tsd"
    subprocess.run(["sh", "-n", str(path)], check=True)
    text = path.read_text()
    unit = (ROOT / "packaging" / "systemd" / "tsd.service").read_text()
    for word in ("--state=/var/lib/tsd/tsd.state", "--socket=/run/tsd/tsd.sock", "--cleanup", "/etc/default/tsd"):
        assert word in text and word in unit

"""An identity moves from tsd to a real tailscaled and back: the state file is the same file."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tsd.base.clock import SystemClock
from tsd.base.entropy import system_entropy
from tsd.base.keys import NodePrivate
from tsd.engine.account.prefs import Persist, Prefs, UserProfile
from tsd.engine.account.profiles import NetworkProfile, Profiles
from tsplatform.state_file import FileStore

pytestmark = [pytest.mark.root, pytest.mark.peers]
NETNS = f"hstate{os.getpid()}"


@pytest.fixture
def inside() -> Iterator[list[str]]:
    """A command prefix for a namespace with loopback only: nothing leaves the machine."""
    resolver = Path("/etc/netns") / NETNS / "resolv.conf"
    resolver.parent.mkdir(parents=True, exist_ok=True)
    resolver.write_text("")
    subprocess.run(["ip", "netns", "add", NETNS], check=True)
    subprocess.run(["ip", "-n", NETNS, "link", "set", "lo", "up"], check=True)
    yield ["ip", "netns", "exec", NETNS]
    subprocess.run(["ip", "netns", "delete", NETNS], check=False)
    resolver.unlink()
    resolver.parent.rmdir()


def _profiles(path: Path) -> Profiles:
    return Profiles(FileStore(path), system_entropy, SystemClock())


def test_tailscaled_goes_on_with_our_state_and_we_with_its(tmp_path: Path, inside: list[str]) -> None:
    peers = Path(os.environ["TSD_PEER_BIN"])
    if not (peers / "tailscaled").exists() or not (peers / "tailscale").exists():
        pytest.skip("no tailscaled in TSD_PEER_BIN")
    path = tmp_path / "state" / "tailscaled.state"
    profiles = _profiles(path)
    machine = profiles.machine_key()
    persist = Persist(NodePrivate.generate(system_entropy), user_profile=UserProfile(7, "me@x", "Me"), node_id="n7")
    profile = profiles.save(
        Prefs(control_url="http://127.0.0.1:9", hostname="h<1>", persist=persist),
        NetworkProfile("tn.example", "x", "X"),
    )
    sock = tmp_path / "s"
    daemon = subprocess.Popen(
        [*inside, peers / "tailscaled", "--tun=userspace-networking", f"--statedir={path.parent}", f"--socket={sock}"],
        env={**os.environ, "TS_NO_LOGS_NO_SUPPORT": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 15
        while not sock.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        cli = [*inside, peers / "tailscale", f"--socket={sock}"]
        listed = subprocess.run([*cli, "switch", "--list"], capture_output=True, text=True, timeout=20).stdout
        assert profile.id in listed and "me@x*" in listed
        shown = subprocess.run([*cli, "debug", "prefs"], capture_output=True, text=True, timeout=20).stdout
        assert "h\\u003c1\\u003e" in shown
        subprocess.run([*cli, "set", "--hostname=other"], check=True, timeout=20)
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(15)
    again = _profiles(path)
    assert again.current.id == profile.id and again.prefs.hostname == "other"
    assert again.machine_key() == machine
    assert again.prefs.node_key == persist.private_node_key
    assert again.set_aside == {}

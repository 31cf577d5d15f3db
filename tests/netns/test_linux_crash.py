"""kill -9 at any moment of start, change and stop: the next start leaves what is wanted, `--cleanup` what was before.

The moments come from a seed. TSD_CRASHES=50 tries as many; without it a few.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time

import pytest

from harness.hoststate import snapshot
from harness.netlab import wait_for
from harness.nodes import QUIET
from harness.routerlab import RouterLab

pytestmark = [pytest.mark.root, pytest.mark.timeout(900)]

CRASHES = int(os.environ.get("TSD_CRASHES", "3"))
SEED = int(os.environ.get("TSD_SEED", "1"))
WANTED = ["--netfilter-mode=on", "--netfilter-backend=auto", "--exit-node=r"]
OTHERS = ["--netfilter-mode=off", "--netfilter-mode=nodivert", "--netfilter-backend=iptables", "--exit-node="]


def _state(net: RouterLab) -> dict[str, list[str]]:
    """Without what is new with every device: its number and its link-local address."""
    texts = snapshot(net.lab, net.c.namespace)
    texts["firewall"] = re.sub(r" packets \d+ bytes \d+", "", texts["firewall"])
    texts["sysctls"] = net.lab.run(net.c.namespace, "sysctl", "-a", "--pattern", "conf.eth0.src_valid_mark")
    lines = {what: re.sub(r"(?m)^\d+: |table \d+: ", "", text).splitlines() for what, text in texts.items()}
    return {what: sorted(line for line in found if "fe80" not in line) for what, found in lines.items()}


def _launch(net: RouterLab) -> None:
    (net.c.folder / "node.sock").unlink(missing_ok=True)
    net.c.process = net.lab.start(
        net.c.namespace, [*net.c.daemon_words(), *net.c.flags()], net.c.log, QUIET | net.c.environ
    )


def _change_in_the_background(net: RouterLab, rng: random.Random) -> subprocess.Popen[bytes]:
    words = [*net.c.cli_words(), f"--socket={net.c.socket}", "set", rng.choice(OTHERS)]
    line = ["ip", "netns", "exec", net.c.namespace, *words]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=net.c._env())


def _crash(net: RouterLab, rng: random.Random, phase: str, start_s: float) -> float:
    """The daemon runs before; how long it lived on after `phase` began."""
    assert net.c.process is not None
    changing = None
    if phase == "start":
        net.c.kill()
        _launch(net)
        delay_s = start_s * 1.2 * rng.random()
    elif phase == "change":
        changing, delay_s = _change_in_the_background(net, rng), 0.8 * rng.random()
    else:
        net.c.process.send(signal.SIGTERM)
        delay_s = 0.2 * rng.random()
    time.sleep(delay_s)
    net.c.kill()
    if changing is not None:
        changing.wait(30)
    return delay_s


def test_f16_kills_at_any_moment_are_undone_or_continued(net: RouterLab) -> None:
    rng = random.Random(SEED)
    net.c.stop()
    before = _state(net)
    _launch(net)
    began = time.monotonic()
    net.c.wait_until_up()
    start_s = time.monotonic() - began
    net.c.call("set", *WANTED)
    wait_for(lambda: any("dev tsd0" in line for line in _state(net)["routes"] if "default" in line), 20, "exit routes")
    time.sleep(1)
    running = _state(net)
    for number in range(CRASHES):
        phase = ("start", "change", "stop")[number % 3]
        what = f"seed {SEED}, kill {number}: {_crash(net, rng, phase, start_s):.3f} s after the begin of {phase}"
        if number % 2:
            net.c.cleanup()
            _equal(net, before, f"{what}, after --cleanup")
            assert not list(net.c.folder.glob("*undo*")), what
        _launch(net)
        net.c.wait_until_up()
        net.c.call("set", *WANTED)
        _equal(net, running, f"{what}, after the next start")
    net.c.call("set", "--exit-node=")
    net.c.stop()
    _equal(net, before, "after a clean stop")
    _launch(net)
    net.c.wait_until_up()


def _equal(net: RouterLab, wanted: dict[str, list[str]], what: str) -> None:
    try:
        wait_for(lambda: _state(net) == wanted, 25, what)
    except TimeoutError:
        now = _state(net)
        differing = {key: (wanted[key], now[key]) for key in wanted if wanted[key] != now[key]}
        pytest.fail(f"{what}: wanted and found {differing}\n{net.c.tail()}")

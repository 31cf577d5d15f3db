"""The real daemon under the commands of its unit file: ready, status, watchdog, reload, stop, cleanup."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.coordproc import CoordProcess
from harness.nodes import ROOT
from harness.supervisor import Supervisor

pytestmark = [pytest.mark.interop, pytest.mark.timeout(240)]


@pytest.fixture
def coord(tmp_path: Path) -> Iterator[CoordProcess]:
    with CoordProcess(tmp_path / "coord") as coord:
        yield coord


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Supervisor]:
    config = tmp_path / "config.hujson"
    config.write_text('{"version": "alpha0", "Locked": false, "Hostname": "first"}')
    paths = {"/var/lib/tsd": str(tmp_path / "lib"), "/run/tsd": str(tmp_path / "run")}
    (tmp_path / "lib").mkdir(mode=0o700)
    (tmp_path / "run").mkdir()
    flags = f"--tun=userspace-networking --config={config}"
    service = Supervisor(tmp_path, paths, flags, watchdog_s=8.0)
    try:
        yield service
    finally:
        service.close()


def _tsctl(service: Supervisor, *words: str, timeout_s: float = 40.0) -> str:
    line = [sys.executable, "-m", "tsctl", f"--socket={service.folder}/run/tsd.sock", *words]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/platform:{ROOT}/native"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, env=env)
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}\n{service.tail()}"
    return done.stdout


def test_a_service_from_start_to_stop(service: Supervisor, coord: CoordProcess) -> None:
    service.start()
    service.wait_for(lambda: service.has("READY"), "READY=1")
    assert json.loads(_tsctl(service, "status", "--json", "--peers=false"))["BackendState"] == "NeedsLogin"
    service.wait_for(lambda: "Needs login" in service.status, "the status line")
    _tsctl(service, "up", f"--login-server={coord.url}", f"--auth-key={coord.auth_key()}", "--hostname=first")
    service.wait_for(lambda: service.status.startswith("Connected; "), "Connected")
    assert re.search(r"100\.64\.\d+\.\d+", service.status), service.status
    _reload_twice(service)
    _hang(service)
    service.wait_for(lambda: service.status.startswith("Connected; "), "the same login after the restart")
    assert list(coord.nodes()) == ["second"], "another node was made"
    assert service.stop() == 0
    service.wait_for(lambda: service.has("STOPPING"), "STOPPING=1", 5)
    assert not (service.folder / "run/tsd.sock").exists()
    assert (service.folder / "lib/tsd.state").exists()
    _journal_lines(service)


def test_a_state_file_that_cannot_be_read_is_told_by_the_status(service: Supervisor) -> None:
    (service.folder / "lib/tsd.state").write_text("{")
    service.start()
    service.wait_for(lambda: service.has("READY"), "READY=1")
    service.wait_for(lambda: service.status.startswith("Does not work: "), "the reason in the status")
    assert "tsd.state" in service.status
    assert service.stop() == 0


def _reload_twice(service: Supervisor) -> None:
    """The configuration file is read again; a broken one is told and changes nothing."""
    config = service.folder / "config.hujson"
    config.write_text('{"version": "alpha0", "Locked": false, "Hostname": "second"}')
    began_us = time.monotonic_ns() // 1000
    service.messages.clear()
    service.reload()
    service.wait_for(lambda: service.has("RELOADING"), "RELOADING=1")
    service.wait_for(lambda: service.has("READY"), "READY=1 after the reload")
    stamp = next(int(one["MONOTONIC_USEC"]) for one in service.messages if "RELOADING" in one)
    assert began_us <= stamp <= time.monotonic_ns() // 1000
    assert json.loads(_tsctl(service, "debug", "prefs"))["Hostname"] == "second"
    config.write_text('{"version": "alpha0", "Hostnmae": "third"}')
    service.messages.clear()
    service.reload()
    service.wait_for(lambda: service.has("READY"), "READY=1 after the broken reload")
    assert "not reloaded" in service.tail() and "hostnmae" in service.tail().lower()
    health = json.loads(_tsctl(service, "status", "--json"))["Health"]
    assert any("--config could not be applied" in text for text in health), health
    config.write_text('{"version": "alpha0", "Locked": false, "Hostname": "second"}')
    service.messages.clear()
    service.reload()
    service.wait_for(lambda: service.has("READY"), "READY=1 after the good reload")
    assert not any("--config" in text for text in json.loads(_tsctl(service, "status", "--json"))["Health"] or ())


def _hang(service: Supervisor) -> None:
    """A loop that stands still sends no pings: it is aborted, says where it stood, and comes back."""
    assert service.watchdog_kills == 0, service.tail()
    service.wait_for(lambda: service.has("WATCHDOG"), "a ping", 20)
    assert service.process is not None
    first = service.process.pid
    service.messages.clear()
    service.process.send_signal(signal.SIGSTOP)
    service.wait_for(lambda: service.watchdog_kills == 1, "the watchdog", 40)
    service.wait_for(lambda: service.has("READY"), "READY=1 after the restart")
    assert service.process.pid != first
    assert "Fatal Python error: Aborted" in service.log.read_text()


def _journal_lines(service: Supervisor) -> None:
    text = service.log.read_text()
    lines = [line for line in text.splitlines() if "tsd." in line and ": " in line and "File " not in line]
    assert all(re.match(r"<[2-7]>", line) for line in lines), lines
    assert re.search(r"^<6>tsd\.daemon\.\w+: ready", text, re.M) and re.search(r"^<3>.*not reloaded", text, re.M)

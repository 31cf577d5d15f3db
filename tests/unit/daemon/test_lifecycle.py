"""The process around the service: signals, exit codes, parent death, log upload, crash text."""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import asyncio, gc, sys
from tsd.daemon import cli, lifecycle
class Fake:
    on_status = None
    def __init__(self, settings): self.settings = settings
    async def start(self):
        print("gc at start", gc.isenabled(), flush=True)
        from tsd.daemon.logsetup import announce_socks5
        announce_socks5("127.0.0.1:1080")
    async def wait(self): await asyncio.Event().wait()
    async def reload(self):
        print("gc when ready", gc.isenabled(), gc.get_freeze_count() > 10000)
        print("reloaded", flush=True)
        self.on_status("Connected")
    async def stop(self): print("stopped", flush=True)
async def build(settings, state, tap):
    print("comm", open("/proc/self/comm").read().strip(), flush=True)
    return Fake(settings)
lifecycle._compose = lambda: build
sys.exit(cli.main(sys.argv[1:]))
"""


def start(
    argv: list[str], env: dict[str, str] | None = None, program: str = PROGRAM, **more: Any
) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **(env or {})}
    return subprocess.Popen(
        [sys.executable, "-c", program, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **more,
    )


def wait_line(stream: Any, text: str) -> str:
    deadline = time.monotonic() + 20
    seen = ""
    while time.monotonic() < deadline:
        line = stream.readline()
        if not line:
            break
        seen += line
        if text in line:
            return str(line)
    raise AssertionError(f"{text!r} not in {seen!r}")


def _argv(tmp_path: Path, name: str = "tsd") -> list[str]:
    return [name, f"--statedir={tmp_path}", f"--socket={tmp_path}/s.sock", "--tun=userspace-networking"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_signal_stops_cleanly(tmp_path: Path, number: signal.Signals, loop: str) -> None:
    process = start(_argv(tmp_path), {"TSD_LOOP": loop})
    wait_line(process.stderr, "ready: LocalAPI")
    wait_line(process.stdout, "gc at start False")
    process.send_signal(signal.SIGHUP)
    wait_line(process.stdout, "gc when ready True True")
    wait_line(process.stdout, "reloaded")
    process.send_signal(number)
    out, err = process.communicate(timeout=15)
    assert process.returncode == 0, err
    assert "stopped" in out


def test_the_drop_in_names_itself_and_prints_what_tools_wait_for(tmp_path: Path) -> None:
    process = start(_argv(tmp_path, "tailscaled"))
    assert wait_line(process.stdout, "comm") == "comm tailscaled\n"
    assert wait_line(process.stderr, "SOCKS5") == "SOCKS5 listening on 127.0.0.1:1080\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)
    assert process.returncode == 0


def test_the_socket_accepts_before_the_engine_is_imported(tmp_path: Path) -> None:
    slow = PROGRAM.replace(
        "lifecycle._compose = lambda: build", "lifecycle._compose = lambda: __import__('time').sleep(60)"
    )
    process = start(_argv(tmp_path), program=slow)
    deadline = time.monotonic() + 10
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.connect(str(tmp_path / "s.sock"))
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
    process.kill()
    process.communicate(timeout=15)
    again = start(_argv(tmp_path))
    wait_line(again.stderr, "ready: LocalAPI")
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=15)
    assert again.returncode == 0
    assert not (tmp_path / "s.sock").exists()


def test_a_second_daemon_is_refused_by_name(tmp_path: Path) -> None:
    process = start(_argv(tmp_path))
    wait_line(process.stderr, "ready: LocalAPI")
    second = start(_argv(tmp_path))
    _, err = second.communicate(timeout=15)
    assert second.returncode == 1
    assert f"(pid {process.pid})" in err
    process.kill()
    process.communicate(timeout=15)


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.set_inheritable(read_fd, True)
    process = start(_argv(tmp_path), {"TS_PARENT_DEATH_FD": str(read_fd)}, pass_fds=(read_fd,))
    os.close(read_fd)
    wait_line(process.stderr, "ready: LocalAPI")
    os.close(write_fd)
    assert process.wait(15) == 1
    process.communicate()


def test_cleanup_returns_at_once(tmp_path: Path) -> None:
    process = start([*_argv(tmp_path), "--cleanup"])
    process.communicate(timeout=15)
    assert process.returncode == 0


class Catcher:
    def __init__(self) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        catcher = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                catcher.bodies.append((self.path, body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def texts(self) -> list[str]:
        return [entry["text"] for _, body in self.bodies for entry in json.loads(body)]


@pytest.fixture
def catcher() -> Iterator[Catcher]:
    made = Catcher()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_logs_go_to_the_target_that_was_named(tmp_path: Path, catcher: Catcher) -> None:
    env = {"TS_LOG_TARGET": catcher.url, "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    process = start(_argv(tmp_path, "tailscaled"), env)
    wait_line(process.stderr, "ready: LocalAPI")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=15)
    assert any("Program starting: " in text for text in catcher.texts())
    assert catcher.texts()[-1].endswith("stopped\n")
    path = catcher.bodies[0][0].split("/")
    assert path[1] == "c" and len(path[3]) == 64


def test_nothing_is_uploaded_without_a_target(tmp_path: Path, catcher: Catcher) -> None:
    process = start([*_argv(tmp_path), "--no-logs-no-support"], {"TS_LOG_TARGET": catcher.url})
    wait_line(process.stderr, "ready: LocalAPI")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=15)
    assert catcher.bodies == []


def test_a_crash_is_told_by_the_next_run(tmp_path: Path, catcher: Catcher) -> None:
    env = {"TS_LOG_TARGET": catcher.url, "TS_LOGS_DIR": str(tmp_path / "logs")}
    argv = ["tailscaled", "--cleanup", f"--statedir={tmp_path}"]
    crashed = start(argv, {**env, "TS_PLEASE_PANIC": "1"})
    crashed.communicate(timeout=15)
    assert crashed.returncode != 0
    assert list((tmp_path / "logs").iterdir())
    assert not any("panic: " in text for text in catcher.texts())
    process = start(argv, env)
    process.communicate(timeout=15)
    assert process.returncode == 0
    assert any(text.startswith("panic: ") for text in catcher.texts())
    assert not list((tmp_path / "logs").iterdir())


def test_extra_fields_reach_the_upload(catcher: Catcher) -> None:
    import logging

    from tsd.daemon.logupload import LogUploader

    uploader = LogUploader(catcher.url, "0" * 64)
    record = logging.LogRecord("tsd.x", logging.INFO, "", 0, "control time", None, None)
    record.upload = {"controltime": "2020-08-03T00:00:00.000000001Z"}
    uploader.emit(record)
    uploader.close()
    assert b'"controltime":"2020-08-03T00:00:00.000000001Z"' in catcher.bodies[0][1]

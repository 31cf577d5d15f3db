"""`tsd container`: the first process of a container. It runs tsd, logs in as the environment says, and waits.

tailscale: cmd/containerboot. Exit status: 0 after a signal, 1 when tsd or the login fails, 2 for a wrong variable; the
last two only after a pause, so that a runtime that starts us again at once does not spin. Settings are applied at each
start, also when TS_AUTH_ONCE keeps the login as it is. Rules for other addresses, Kubernetes secrets and serving are
not here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tsctl.client import LocalClient
from tsctl.goflags import Failure
from tsd.base.errors import ConfigError
from tsd.daemon.container_env import SECRETS, Boot, read
from tsd.localapi.schema import NEEDS_LOGIN, NO_STATE

HELP = """usage: tsd container

Runs tsd and logs in, as these variables say: TS_AUTHKEY (or TS_AUTH_KEY), TS_AUTH_ONCE, TS_HOSTNAME, TS_ROUTES,
TS_ACCEPT_DNS, TS_EXTRA_ARGS (flags of `tsctl up`; they are the last word), TS_STATE_DIR, TS_USERSPACE, TS_SOCKET,
TS_TAILSCALED_EXTRA_ARGS (flags of tsd), TS_SOCKS5_SERVER, TS_OUTBOUND_HTTP_PROXY_LISTEN, TS_DEBUG_ADDR_PORT,
TS_BOOT_TIMEOUT, TS_ENABLE_HEALTH_CHECK, TS_ENABLE_METRICS, TS_LOCAL_ADDR_PORT, TSD_REQUIRE_DURABLE_STATE.

Exit status: 0 after SIGTERM, 1 when tsd or the login fails, 2 for a wrong variable."""
PAUSE_S = 10.0
"""Before an exit that is our own fault."""
STOP_S = 25
"""How long tsd may take to log out and end."""
POLL_S = 0.2
_STOPS = (signal.SIGTERM, signal.SIGINT)


def main(environ: Mapping[str, str], words: Sequence[str] = ()) -> int:
    if words:
        is_help = words[0].lstrip("-") in ("h", "help")
        print(
            HELP if is_help else f"tsd container takes no arguments: {words[0]!r}; it reads variables", file=sys.stderr
        )
        return 0 if is_help else 2
    try:
        boot = read(environ)
    except ConfigError as err:
        _say(str(err))
        _pause()
        return 2
    return _Supervisor(boot, environ).run()


def _say(text: str) -> None:
    print(f"tsd container: {text}", file=sys.stderr, flush=True)


def _pause() -> None:
    """Only where nobody but a runtime is watching; a signal ends it, though the kernel ignores those for the first
    process unless they are waited for."""
    if os.getpid() == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        signal.sigtimedwait(_STOPS, PAUSE_S)


class _Supervisor:
    def __init__(self, boot: Boot, environ: Mapping[str, str]) -> None:
        self._boot = boot
        self._environ = {name: value for name, value in environ.items() if name not in SECRETS}
        self._daemon: subprocess.Popen[bytes] | None = None
        self._helper: subprocess.Popen[bytes] | None = None
        self._is_stopping = False

    def run(self) -> int:
        for note in self._boot.notes:
            _say(note)
        for number in _STOPS:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_overdue)
        self._daemon = self._start("tsd", *self._boot.daemon_flags)
        try:
            is_up = self._wait_for_socket() and self._configure()
            if is_up and not self._is_stopping:
                self._serve_health()
                _say("startup complete")
                return self._wait()
        finally:
            self._stop()
        if self._is_stopping:
            return 0
        _pause()
        return 1

    def _start(self, module: str, *words: str, stdin: Any = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", module, *words], env=self._environ, stdin=stdin)

    # --- signals

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_stopping = True
        for process in (self._helper, self._daemon):
            if process is not None:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGTERM)
        signal.alarm(STOP_S)

    def _on_overdue(self, number: int, frame: object) -> None:
        if self._daemon is not None:
            with contextlib.suppress(OSError):
                os.kill(self._daemon.pid, signal.SIGKILL)

    def _stop(self) -> None:
        if self._daemon is not None and self._daemon.poll() is None:
            self._daemon.terminate()
            signal.alarm(STOP_S)
            self._daemon.wait()
        signal.alarm(0)

    # --- starting

    def _is_daemon_up(self) -> bool:
        return self._daemon is not None and self._daemon.poll() is None

    def _status(self) -> dict[str, Any] | None:
        try:
            return LocalClient(self._boot.socket).status(with_peers=False)
        except (Failure, OSError):
            return None

    def _wait_for_socket(self) -> bool:
        """A daemon that has said in which state it is; one with a login needs no control for that."""
        deadline = time.monotonic() + self._boot.timeout_s
        while time.monotonic() < deadline and not self._is_stopping:
            if not self._is_daemon_up():
                _say("tsd has ended; its last lines say why")
                return False
            status = self._status()
            if status is not None and (status.get("BackendState") != NO_STATE or status.get("HaveNodeKey")):
                return True
            time.sleep(POLL_S)
        if not self._is_stopping:
            _say(f"tsd did not answer on {self._boot.socket} within {self._boot.timeout_s:.0f} s (TS_BOOT_TIMEOUT)")
        return False

    def _configure(self) -> bool:
        state = (self._status() or {}).get("BackendState")
        if self._boot.is_auth_once and state != NEEDS_LOGIN:
            return self._tsctl("set", *self._boot.set_flags)
        words = ["up", "--reset", *self._boot.up_flags]
        if not self._boot.auth_key:
            return self._tsctl(*words)
        words.append("--auth-key=file:/dev/stdin")
        if not any(word.startswith("--timeout=") for word in words):
            words.append(f"--timeout={self._boot.timeout_s}s")
        return self._tsctl(*words, said=self._boot.auth_key)

    def _tsctl(self, *words: str, said: str = "") -> bool:
        """`said` goes to standard input: keys stay out of the list of processes."""
        if said.startswith("file:"):
            words, said = tuple(word.replace("file:/dev/stdin", said) for word in words), ""
        stdin = subprocess.PIPE if said else subprocess.DEVNULL
        self._helper = self._start("tsctl", f"--socket={self._boot.socket}", *words, stdin=stdin)
        self._helper.communicate(said.encode() if said else None)
        code, self._helper = self._helper.returncode, None
        if code and not self._is_stopping:
            _say(f"tsctl {words[0]} failed with exit status {code}")
        return code == 0

    # --- running

    def _wait(self) -> int:
        """Until tsd ends; also takes leave of processes that others left to us, when we are the first."""
        assert self._daemon is not None
        while self._daemon.returncode is None:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                self._daemon.poll()
                break
            if pid == self._daemon.pid:
                self._daemon.returncode = os.waitstatus_to_exitcode(status)
        if self._is_stopping:
            return 0
        _say(f"tsd ended by itself with exit status {self._daemon.returncode}")
        _pause()
        return 1

    def _serve_health(self) -> None:
        if not self._boot.listen:
            return
        host, _, port = self._boot.listen.rpartition(":")
        try:
            server = _server(host.strip("[]"), int(port), self._boot)
        except OSError as err:
            _say(f"no health check: cannot listen on {self._boot.listen}: {err.strerror or err}")
            return
        threading.Thread(target=server.serve_forever, daemon=True).start()


def _server(host: str, port: int, boot: Boot) -> ThreadingHTTPServer:
    import socket

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = _answer(boot, self.path.partition("?")[0])
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    try:
        return Server((host, port), Handler)
    except OSError:
        if host != "::":
            raise
        Server.address_family = socket.AF_INET  # a host without IPv6
        return Server(("0.0.0.0", port), Handler)


def _answer(boot: Boot, path: str) -> tuple[int, str]:
    try:
        client = LocalClient(boot.socket)
        if path == "/metrics" and boot.has_metrics:
            return 200, client.call("GET", "usermetrics").body.decode()
        if path == "/healthz" and boot.has_health:
            has_address = bool(client.status(with_peers=False).get("TailscaleIPs"))
            return (200, "ok\n") if has_address else (503, "node currently has no tailscale IPs\n")
    except (Failure, OSError) as err:
        return 503, f"tsd does not answer: {err}\n"
    return 404, "not found\n"

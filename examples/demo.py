"""`make demo`: a whole tailnet on this machine in a few seconds, without root and without the internet.

Starts `tsd coord` and two `tsd --tun=userspace-networking`, joins them with an auth key, pings until the path is
direct, and fetches a web page through the tailnet in three ways. Each step says what happened. Run it with the
Python of `.venv`; `KEEP=1` leaves everything running and prints commands to play with.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SCRIPTS = Path(sys.executable).parent
TSD, TSCTL = str(SCRIPTS / "tsd"), str(SCRIPTS / "tsctl")
PAGE = b"<h1>Hello from the second node</h1>\n"
READY_LIMIT_S = 20.0
PING_LIMIT_S = 20.0


class DemoFailed(Exception):
    """A step did not do what it should; the text says which."""


class Demo:
    """The processes, their folder, and the steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.control = f"127.0.0.1:{free_port()}"
        self.socks, self.proxy = free_port(), free_port()
        self.web: http.server.ThreadingHTTPServer | None = None
        self._began = time.monotonic()
        self._step = 0

    # --- telling -----------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self._step += 1
        print(f"\n[{self._step}] {text}   ({time.monotonic() - self._began:.1f} s)", flush=True)

    def show(self, text: str) -> None:
        for line in text.rstrip().splitlines():
            print(f"      {line}", flush=True)

    # --- processes ---------------------------------------------------------------------------------------------

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Its output goes to `<name>.log`."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=clean_env()
            )
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def run(self, *command: str, stdin: bytes = b"") -> str:
        """Its standard output; the whole story when it fails."""
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=60, env=clean_env())
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        if done.returncode != 0:
            raise DemoFailed(f"{shown(command)} ended with {done.returncode}:\n{out}{err}")
        return out

    def tsctl(self, node: str, *arguments: str, stdin: bytes = b"") -> str:
        return self.run(TSCTL, f"--socket={self.socket(node)}", *arguments, stdin=stdin)

    def socket(self, node: str) -> Path:
        return self.folder / node / "tsd.sock"

    def stop(self) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.web is not None:
            self.web.shutdown()
            self.web.server_close()

    # --- steps -------------------------------------------------------------------------------------------------

    def start_coordination(self) -> None:
        self.say("Starting the coordination server: control, relay (DERP) and STUN in one process.")
        process = self.start(
            "coord",
            *(TSD, "coord", f"--state={self.folder / 'coord'}", f"--listen={self.control}"),
            *(f"--derp-listen=127.0.0.1:{free_port()}", f"--stun-listen=127.0.0.1:{free_port(socket.SOCK_DGRAM)}"),
        )
        host, _, port = self.control.partition(":")
        wait_for(lambda: can_connect(host, int(port)), process, "coord", self)
        self.show(f"It answers on http://{self.control}")

    def create_key(self) -> Path:
        self.say("Creating an auth key and putting it into a file, so that it never shows in a process list.")
        path = self.folder / "auth.key"
        self.run(TSD, "coord", "keys", "create", f"--state={self.folder / 'coord'}", "--reusable", f"--output={path}")
        self.show(f"{path} (mode 0600)")
        return path

    def start_node(self, node: str, *flags: str) -> None:
        self.start(
            node,
            *(TSD, "--tun=userspace-networking", f"--statedir={self.folder / node}", f"--socket={self.socket(node)}"),
            *flags,
        )

    def start_nodes(self) -> None:
        self.say("Starting two nodes. Both run without root: the TCP/IP stack of the tailnet lives inside tsd.")
        for node in ("one", "two"):
            (self.folder / node).mkdir(mode=0o700)
        self.start_node(
            "one", f"--socks5-server=127.0.0.1:{self.socks}", f"--outbound-http-proxy-listen=127.0.0.1:{self.proxy}"
        )
        self.start_node("two")
        for node, process in zip(("one", "two"), self.processes[-2:], strict=True):
            wait_for(functools.partial(can_connect_unix, self.socket(node)), process, node, self)
        self.show(
            f"one: LocalAPI {self.socket('one')}, SOCKS5 127.0.0.1:{self.socks}, HTTP proxy 127.0.0.1:{self.proxy}"
        )
        self.show(f"two: LocalAPI {self.socket('two')}")

    def join(self, key: Path) -> None:
        self.say("Joining both nodes to the tailnet with `tsctl up`.")
        for node in ("one", "two"):
            self.tsctl(
                node,
                *("up", f"--login-server=http://{self.control}", f"--auth-key=file:{key}", f"--hostname={node}"),
            )
            self.show(f"{node} has the address {self.address(node)}")

    def address(self, node: str) -> str:
        return self.tsctl(node, "ip", "-4").split()[0]

    def show_status(self) -> None:
        for node in ("one", "two"):
            self.say(f"`tsctl status` on {node}:")
            self.show(self.tsctl(node, "status"))

    def ping(self) -> None:
        self.say("Pinging two from one until the path is direct. The first answers may come through the relay.")
        began = time.monotonic()
        while True:
            out = self.tsctl("one", "ping", "-c", "10", "--timeout=2s", "two")
            self.show(out)
            last = out.strip().splitlines()[-1]
            if " via " in last and "DERP" not in last:
                break
            if time.monotonic() - began > PING_LIMIT_S:
                raise DemoFailed("the path did not become direct")
        self.show("The packets go straight from one to the other now; the relay only helped them meet.")

    def serve_page(self) -> int:
        self.say("Serving a web page on 127.0.0.1 behind node two.")
        folder = self.folder / "www"
        folder.mkdir()
        (folder / "index.html").write_bytes(PAGE)
        if os.environ.get("KEEP"):
            port = free_port()
            self.start(
                "web", sys.executable, "-m", "http.server", str(port), "--bind=127.0.0.1", f"--directory={folder}"
            )
            wait_for(lambda: can_connect("127.0.0.1", port), self.processes[-1], "web", self)
            return port
        handler = functools.partial(QuietHandler, directory=str(folder))
        self.web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.web.serve_forever, daemon=True).start()
        return self.web.server_port

    def fetch(self, port: int) -> None:
        self.say("Fetching it from node one, by name, through SOCKS5:")
        self.check(fetch_socks5(self.socks, "two", port))
        self.say("The same through the HTTP proxy:")
        self.check(fetch_http_proxy(self.proxy, "two", port))
        self.say("And with `tsctl nc`:")
        request = b"GET / HTTP/1.0\r\nHost: two\r\n\r\n"
        self.check(self.tsctl("one", "nc", "two", str(port), stdin=request).encode())

    def check(self, answer: bytes) -> None:
        if PAGE not in answer:
            raise DemoFailed(f"the page did not come; got {answer[:300]!r}")
        self.show(PAGE.decode())

    def play(self, port: int) -> None:
        """What to try while everything is left running."""
        one, two = f"{TSCTL} --socket={self.socket('one')}", f"{TSCTL} --socket={self.socket('two')}"
        print(
            f"""
Everything is still running. Try:
      {one} status
      {one} ping two
      {two} status --json
      curl --proxy socks5h://127.0.0.1:{self.socks} http://two:{port}/
      {TSD} coord nodes list --state={self.folder / "coord"}
Logs are in {self.folder}. Stop it all with:
      kill {" ".join(str(process.pid) for process in self.processes)}; rm -r {self.folder}
"""
        )


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def shown(command: tuple[str, ...]) -> str:
    return " ".join(Path(word).name if index == 0 else word for index, word in enumerate(command))


def clean_env() -> dict[str, str]:
    """Without what would change the outcome: proxies, drop-in mode, another daemon's knobs. No router is asked."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and not name.startswith(("TS_", "TSD_COMPAT", "TSD_SOCKET", "NOTIFY_"))
    }
    return kept | {"TS_DISABLE_PORTMAPPER": "1"}


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def can_connect(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    return False


def can_connect_unix(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))
        return True
    return False


def wait_for(is_ready: object, process: subprocess.Popen[bytes], name: str, demo: Demo) -> None:
    assert callable(is_ready)
    deadline = time.monotonic() + READY_LIMIT_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise DemoFailed(f"{name} did not start:\n{demo.log(name)}")
        time.sleep(0.03)


def read_all(sock: socket.socket) -> bytes:
    out = b""
    while chunk := sock.recv(65536):
        out += chunk
    return out


def fetch_socks5(proxy_port: int, host: str, port: int) -> bytes:
    """RFC 1928: the name goes to the proxy, which knows the tailnet."""
    with socket.create_connection(("127.0.0.1", proxy_port), 10.0) as sock:
        sock.sendall(b"\x05\x01\x00")
        if sock.recv(2) != b"\x05\x00":
            raise DemoFailed("the SOCKS5 proxy refused")
        name = host.encode()
        sock.sendall(b"\x05\x01\x00\x03" + bytes([len(name)]) + name + port.to_bytes(2, "big"))
        answer = sock.recv(262)
        if answer[1:2] != b"\x00":
            raise DemoFailed(f"SOCKS5 could not connect to {host}:{port}: {answer!r}")
        sock.sendall(f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        return read_all(sock)


def fetch_http_proxy(proxy_port: int, host: str, port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", proxy_port, timeout=10.0)
    connection.request("GET", f"http://{host}:{port}/")
    return connection.getresponse().read()


def main() -> int:
    keep = os.environ.get("KEEP", "") not in ("", "0")
    folder = Path(tempfile.mkdtemp(prefix="tsd-demo-"))
    demo = Demo(folder)
    is_done = False
    try:
        demo.start_coordination()
        key = demo.create_key()
        demo.start_nodes()
        demo.join(key)
        demo.show_status()
        demo.ping()
        port = demo.serve_page()
        demo.fetch(port)
        is_done = True
        if keep:
            demo.play(port)
        return 0
    except (DemoFailed, OSError, subprocess.TimeoutExpired) as err:
        print(f"\nThe demo failed: {err}", file=sys.stderr)
        for path in sorted(folder.glob("*.log")):
            print(f"--- the end of {path.name}:\n{path.read_text(errors='replace')[-3000:]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if not (keep and is_done):
            demo.stop()
            shutil.rmtree(folder, ignore_errors=True)
            if is_done:
                demo.say("Stopped everything; nothing is left behind.")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())

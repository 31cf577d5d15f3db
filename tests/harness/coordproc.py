"""`tsd coord` for tests: as a process (perhaps in a network namespace), or inside the running loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tsd.base.addr import AddrPort, parse_ip
from tsd.coord.admin import AdminServer
from tsd.coord.adminclient import call
from tsd.coord.server import CoordServer
from tsd.coord.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 60.0


class CoordProcess:
    """A coord of its own. Ports 0 are chosen by the kernel and found out afterwards through `status`."""

    def __init__(
        self,
        state: Path,
        *,
        netns: str = "",
        address: str = "127.0.0.1",
        control_port: int = 0,
        derp_port: int = 0,
        stun_port: int = 0,
        extra: tuple[str, ...] = (),
    ) -> None:
        self.state = state
        self.log_path = state.parent / f"{state.name}.log"
        self._netns = netns
        self._arguments = [
            f"--state={state}",
            f"--listen={address}:{control_port}",
            f"--derp-listen={address}:{derp_port}",
            f"--stun-listen={address}:{stun_port}",
            *extra,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> CoordProcess:
        """Returns when the admin socket answers."""
        command = [sys.executable, "-m", "tsd.coord", *self._arguments]
        if self._netns:
            command = ["ip", "netns", "exec", self._netns, *command]
        paths = os.pathsep.join(str(ROOT / part) for part in (".", "platform", "native"))
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, stdout=log, stderr=log
            )
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                self.status()
                return self
            except Exception as err:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"tsd coord did not start: {err}\n{self.log()}") from None
                time.sleep(0.05)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def call(self, command: str, **arguments: Any) -> Any:
        """An admin command, such as `call("keys.create", reusable=True)`."""
        return call(self.state, command, arguments)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.call("status")
        return found

    @property
    def url(self) -> str:
        return str(self.status()["url"])

    def auth_key(self, **options: Any) -> str:
        return str(self.call("keys.create", **options)["key"])

    def nodes(self) -> dict[str, dict[str, Any]]:
        """By name."""
        return {node["name"]: node for node in self.call("nodes.list")}

    def wait_for(self, name: str, timeout_s: float = 30.0, **wanted: Any) -> dict[str, Any]:
        """The node of that name, as soon as its fields are as wanted."""
        deadline = time.monotonic() + timeout_s
        while True:
            node = self.nodes().get(name)
            if node is not None and all(node[key] == value for key, value in wanted.items()):
                return node
            if time.monotonic() > deadline:
                raise AssertionError(f"{name}: wanted {wanted}, is {json.dumps(node)}\n{self.log()}")
            time.sleep(0.1)

    def set_policy(self, text: str) -> None:
        self.call("policy.set", policy=text)

    def stop(self, *, kill: bool = False) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            self.process.wait(15)
            self.process = None

    def __enter__(self) -> CoordProcess:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()


@asynccontextmanager
async def coord_in_process(state: Path, address: str = "127.0.0.1", **options: Any) -> AsyncIterator[CoordServer]:
    """A server in the running loop on ports of the kernel's choice; `options` are fields of `Settings`."""
    somewhere = AddrPort(parse_ip(address), 0)
    settings = Settings(state=state, listen=somewhere, derp_listen=somewhere, stun_listen=somewhere, **options)
    server = CoordServer(settings)
    await server.start()
    admin = AdminServer(server)
    await admin.start()
    try:
        yield server
    finally:
        await admin.close()
        await server.close()

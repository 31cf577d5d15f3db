"""tsctl run in this process against a fake daemon on a real socket."""

import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from harness.fakebackend import FakeBackend
from harness.fakedaemon import RecordingServer, serving
from tsctl.root import run


class Outcome(NamedTuple):
    code: int
    out: str
    err: str
    calls: list[str]


class Tsctl:
    def __init__(self, path: str, backend: FakeBackend, server: RecordingServer, capsys: pytest.CaptureFixture) -> None:
        self.path = path
        self.backend = backend
        self.server = server
        self._capsys = capsys

    def __call__(self, *words: str) -> Outcome:
        self.server.recorded.clear()
        self._capsys.readouterr()
        code = run([f"--socket={self.path}", *words])
        out, err = self._capsys.readouterr()
        return Outcome(code, out, err, list(self.server.recorded))

    def later(self, delay_s: float, action: object, *args: object) -> None:
        """Call `action(*args)` in the daemon's loop after a while."""
        loop = self.server.loop
        loop.call_soon_threadsafe(lambda: loop.call_later(delay_s, action, *args))


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def tsctl(backend: FakeBackend, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tsctl]:
    for name in ("SSH_CLIENT", "TSD_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="tsd") as folder, serving(f"{folder}/s", backend) as server:
        yield Tsctl(f"{folder}/s", backend, server, capsys)


@pytest.fixture
def logged_out_backend() -> FakeBackend:
    return FakeBackend(is_logged_in=False)

"""Run a LocalAPI server with a FakeBackend: `python fakedaemon.py SOCKET [logged-out]`, or `serving()` in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator

from harness.fakebackend import FakeBackend
from tsd.localapi.call import Call
from tsd.localapi.server import LocalApiServer


class RecordingServer(LocalApiServer):
    """Keeps `METHOD target` of every call, without the common prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[str] = []
        self.loop: asyncio.AbstractEventLoop

    def _call(self, *args: object, **kwargs: object) -> Call:
        call = super()._call(*args, **kwargs)  # type: ignore[arg-type]
        self.recorded.append(f"{call.method} {call.head.target.removeprefix('/localapi/v0/')}")
        return call


async def run(path: str, backend: FakeBackend) -> None:
    server = LocalApiServer()
    await server.listen(path)
    server.set_backend(backend)
    await asyncio.Event().wait()


@contextlib.contextmanager
def serving(path: str, backend: FakeBackend) -> Iterator[RecordingServer]:
    """A server in its own thread, for clients that block. `server.loop` is the loop of that thread."""
    loop = asyncio.new_event_loop()
    server = RecordingServer()
    server.loop = loop
    ready, stop = threading.Event(), asyncio.Event()

    async def work() -> None:
        await server.listen(path)
        server.set_backend(backend)
        ready.set()
        await stop.wait()
        await server.close()

    def run_loop() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(work())

    thread = threading.Thread(target=run_loop, daemon=True)
    thread.start()
    if not ready.wait(5.0):
        raise RuntimeError("the fake daemon did not start")
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5.0)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], FakeBackend(is_logged_in="logged-out" not in sys.argv[2:])))

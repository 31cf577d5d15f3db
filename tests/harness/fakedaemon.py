"""Run a LocalAPI server with a FakeBackend: `python fakedaemon.py SOCKET [logged-out]`, or `serving()` in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator

from harness.fakebackend import FakeBackend
from tsd.localapi.server import LocalApiServer


async def run(path: str, backend: FakeBackend) -> None:
    server = LocalApiServer()
    await server.listen(path)
    server.set_backend(backend)
    await asyncio.Event().wait()


@contextlib.contextmanager
def serving(path: str, backend: FakeBackend) -> Iterator[asyncio.AbstractEventLoop]:
    """A server in its own thread, for clients that block."""
    loop = asyncio.new_event_loop()
    server = LocalApiServer()
    ready = threading.Event()

    async def open_it() -> None:
        await server.listen(path)
        server.set_backend(backend)
        ready.set()

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(open_it())
        loop.run_forever()
        loop.run_until_complete(server.close())
        loop.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    if not ready.wait(5.0):
        raise RuntimeError("the fake daemon did not start")
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5.0)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], FakeBackend(is_logged_in="logged-out" not in sys.argv[2:])))

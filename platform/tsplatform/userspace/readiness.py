"""Which of many sockets can be read or written, at the price of one system call for each socket's life.

The loop's own `add_reader` and `add_writer` cost several system calls and a handle at every change (libuv checks,
adds and removes). Here sockets are registered once, edge-triggered, in an epoll descriptor that the loop watches
(epoll(7)). Where there is no epoll the loop itself is asked; the same callers work on both, because they say `more`
when a socket had no more to give.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

READABLE, WRITABLE, FAILED = 1, 2, 4
Wake = Callable[[int], None]
"""Called with bits. READABLE and WRITABLE are hints: the socket may block all the same. FAILED comes with both of them,
and only from epoll: a socket that is watched by the loop says it when it is read or written."""

_MAX_EVENTS = 256


class Readiness(Protocol):
    def watch(self, fd: int, wake: Wake) -> None:
        """Tell `wake` from now on, first of all what is ready already; a new `wake` takes the old one's place."""

    def more(self, fd: int, bits: int) -> None:
        """The socket would block: wake again when it does no longer."""

    def forget(self, fd: int) -> None:
        """Before the socket is closed or handed on; unknown ones do not matter."""

    def close(self) -> None: ...


def readiness(loop: asyncio.AbstractEventLoop) -> Readiness:
    """The best for this system; the owner closes it."""
    return EpollReadiness(loop) if hasattr(select, "epoll") else LoopReadiness(loop)


class EpollReadiness:
    """Edge-triggered, through a descriptor of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._wakes: dict[int, Wake] = {}
        self._forgotten: set[int] = set()
        self._mask = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
        self._readable = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
        self._writable = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
        loop.add_reader(self._epoll.fileno(), self._on_events)

    def watch(self, fd: int, wake: Wake) -> None:
        if fd in self._wakes:
            self._epoll.modify(fd, self._mask)  # tells again what is ready
        else:
            self._epoll.register(fd, self._mask)
        self._wakes[fd] = wake

    def more(self, fd: int, bits: int) -> None:
        """The edge will come by itself."""

    def forget(self, fd: int) -> None:
        if self._wakes.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            self._forgotten.add(fd)

    def close(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._wakes.clear()

    def _on_events(self) -> None:
        self._forgotten.clear()
        for fd, events in self._epoll.poll(0, _MAX_EVENTS):
            wake = self._wakes.get(fd)
            if wake is not None and fd not in self._forgotten:  # else an event of what had this number before
                _tell(wake, self._bits(events))

    def _bits(self, events: int) -> int:
        bits = READABLE if events & self._readable else 0
        bits |= WRITABLE if events & self._writable else 0
        return bits | FAILED if events & select.EPOLLERR else bits


class LoopReadiness:
    """By the loop's readers and writers, which are removed when they fired."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._wakes: dict[int, Wake] = {}

    def watch(self, fd: int, wake: Wake) -> None:
        self._wakes[fd] = wake
        self.more(fd, READABLE | WRITABLE)

    def more(self, fd: int, bits: int) -> None:
        if fd in self._wakes:
            if bits & READABLE:
                self._loop.add_reader(fd, self._on_readable, fd)
            if bits & WRITABLE:
                self._loop.add_writer(fd, self._on_writable, fd)

    def forget(self, fd: int) -> None:
        if self._wakes.pop(fd, None) is not None:
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)

    def close(self) -> None:
        for fd in list(self._wakes):
            self.forget(fd)

    def _on_readable(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        _tell(self._wakes[fd], READABLE)

    def _on_writable(self, fd: int) -> None:
        self._loop.remove_writer(fd)
        _tell(self._wakes[fd], WRITABLE)


def _tell(wake: Wake, bits: int) -> None:
    try:
        wake(bits)
    except Exception:
        log.exception("what waited for a socket failed")

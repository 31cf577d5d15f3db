"""`tsctl nc HOST PORT`: standard input and output joined to a TCP port of the tailnet."""

from __future__ import annotations

import os
import select
import socket

from tsctl import context as ctx
from tsctl.client import ApiFailure
from tsctl.goflags import Command, Failure, Parsed, UsageError
from tsd.localapi.schema import STATUS_PUMP

STDIN, STDOUT = 0, 1
PIECE_BYTES = 65536
QUIET_BEFORE_EOF_S = 1.0


def nc_command(context: ctx.Context) -> Command:
    def run(parsed: Parsed) -> None:
        status = context.client.status()
        ctx.require_running(status)
        if len(parsed.args) != 2:
            raise UsageError("usage: tsctl nc <hostname-or-IP> <port>")
        host, port_text = parsed.args
        port = int(port_text) if port_text.isascii() and port_text.isdigit() else -1
        if not 0 <= port <= 65535:
            raise UsageError(f"invalid port number {ctx.quoted(port_text)}: a port is 1 to 65535")
        sock, early = _connect(context, host, port)
        # tailscaled drops the whole connection at our half-close, so it gets one only after a silence.
        _copy(sock, early, quiet_s=0.0 if STATUS_PUMP in status else QUIET_BEFORE_EOF_S)

    return Command("nc", "Connect to a peer's TCP port", run, usage="<hostname-or-IP> <port>", max_args=-1)


def _connect(context: ctx.Context, host: str, port: int) -> tuple[socket.socket, bytes]:
    try:
        sock, early, direct = context.client.dial(host, port)
    except ApiFailure as failure:
        raise Failure(f"cannot connect to {ctx.quoted(host)} port {port}: {failure.message}") from None
    if sock >= 0:
        return socket.socket(fileno=sock), early
    address, _, own_port = direct.rpartition(":")
    try:
        return socket.create_connection((address.strip("[]"), int(own_port)), 30.0), b""
    except (OSError, ValueError) as error:
        raise Failure(f"cannot connect to {ctx.quoted(host)} port {port}: {error}") from None


def _copy(sock: socket.socket, early: bytes, quiet_s: float) -> None:
    """Both ways until the peer ends; the end of our input is passed on as a half-close."""
    sock.settimeout(None)
    _write_all(early)
    sources: list[int] = [sock.fileno(), STDIN]
    while True:
        ready, _, _ = select.select(sources, [], [], quiet_s if len(sources) == 1 and quiet_s else None)
        if not ready:
            quiet_s = 0.0
            _half_close(sock)
            continue
        if sock.fileno() in ready:
            try:
                data = sock.recv(PIECE_BYTES)
            except ConnectionError:
                raise Failure("connection reset by the other end") from None
            if not data:
                return
            _write_all(data)
        if STDIN in ready:
            data = os.read(STDIN, PIECE_BYTES)
            if data:
                _send_all(sock, data)
                continue
            sources.remove(STDIN)
            if not quiet_s:
                _half_close(sock)


def _send_all(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except (BrokenPipeError, ConnectionError):
        raise Failure("connection closed by the other end") from None


def _half_close(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def _write_all(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(STDOUT, view) :]


COMMANDS = {"nc": nc_command}

"""Questions before a change that would cut the connection the user is typing on.

The connection is looked for in SSH_CLIENT, in the environment of the session's processes (sudo drops the variable), and
in the sockets of the processes above us. Without a terminal the answer is no.
"""

from __future__ import annotations

import os
import sys

from tsctl.goflags import Failure

LOSE_SSH = "lose-ssh"
_TAILNET_V4_FIRST, _TAILNET_V4_BITS = 100 << 24 | 64 << 16, 10
_TAILNET_V6_PREFIX = bytes.fromhex("fd7a115ca1e0")
MAX_ANCESTORS = 32


def confirm_lose_ssh(accepted: str, consequence: str) -> None:
    """Ask when this session comes in over the tailnet. Raises Failure when the answer is no."""
    if not comes_over_tailnet():
        return
    confirm(LOSE_SSH, accepted, f"You are connected over the tailnet. {consequence}")


def confirm(risk: str, accepted: str, message: str) -> None:
    names = [name.strip() for name in accepted.split(",")]
    if risk in names or "all" in names:
        return
    sys.stderr.write(f"{message}\nTo skip this warning, use --accept-risk={risk}\n")
    if not ask("Continue?", default=False):
        raise Failure("aborted, no changes made")


def ask(question: str, *, default: bool) -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return default
    sys.stderr.write(f"{question} [{'Y/n' if default else 'y/N'}] ")
    sys.stderr.flush()
    answer = sys.stdin.readline().strip().lower()
    return answer in ("y", "yes") if answer else default


def comes_over_tailnet() -> bool:
    client = os.environ.get("SSH_CLIENT", "").split(" ")[0]
    if client:
        return is_tailnet_address(client)
    return any(_process_comes_over_tailnet(pid) for pid in _ancestors())


def is_tailnet_address(text: str) -> bool:
    import socket

    text = text.partition("%")[0].removeprefix("::ffff:")
    try:
        if ":" in text:
            return socket.inet_pton(socket.AF_INET6, text).startswith(_TAILNET_V6_PREFIX)
        return _is_tailnet_v4(int.from_bytes(socket.inet_aton(text), "big"))
    except OSError:
        return False


def _is_tailnet_v4(number: int) -> bool:
    return number >> (32 - _TAILNET_V4_BITS) == _TAILNET_V4_FIRST >> (32 - _TAILNET_V4_BITS)


def _ancestors() -> list[int]:
    """The processes above us, and the leader of our session."""
    found: list[int] = []
    pid = os.getppid()
    while pid > 1 and len(found) < MAX_ANCESTORS:
        found.append(pid)
        pid = _parent(pid)
    try:
        found.append(os.getsid(0))
    except OSError:
        pass
    return found


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _process_comes_over_tailnet(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            for variable in file.read().split(b"\0"):
                if variable.startswith(b"SSH_CLIENT="):
                    return is_tailnet_address(variable[11:].split(b" ")[0].decode("ascii", "replace"))
        links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    return bool(inodes) and any(_socket_table_has(name, inodes) for name in ("tcp", "tcp6"))


def _socket_table_has(table: str, inodes: set[str]) -> bool:
    try:
        with open(f"/proc/net/{table}", encoding="utf-8") as file:
            rows = [line.split() for line in file][1:]
    except OSError:
        return False
    return any(len(row) > 9 and row[9] in inodes and _is_tailnet_hex(row[2].partition(":")[0]) for row in rows)


def _is_tailnet_hex(remote: str) -> bool:
    """An address as /proc/net/tcp prints it: 32-bit words in host byte order."""
    try:
        words = [bytes.fromhex(remote[i : i + 8]) for i in range(0, len(remote), 8)]
    except ValueError:
        return False
    raw = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    if len(raw) == 16 and raw.startswith(bytes(10) + b"\xff\xff"):
        raw = raw[12:]
    return _is_tailnet_v4(int.from_bytes(raw, "big")) if len(raw) == 4 else raw.startswith(_TAILNET_V6_PREFIX)

"""`tsctl ssh [USER@]HOST [COMMAND …]`: this machine's ssh, through the daemon where the kernel has no way to the peer.

tailscale: cmd/tailscale/cli/ssh.go. Host keys that the coordination server tells are the only ones accepted; for other
peers ssh asks as it always does, under the peer's name, whatever its address is.
"""

from __future__ import annotations

import os
import shlex
import sys

from tsctl import context as ctx
from tsctl.addresses import resolve
from tsctl.goflags import Command, Failure, Parsed, UsageError
from tsctl.status import is_ip

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def ssh_command(context: ctx.Context) -> Command:
    def run(parsed: Parsed) -> None:
        if not parsed.args:
            raise UsageError("usage: tsctl ssh [user@]<host> [ssh's own arguments]")
        status = context.client.status()
        ctx.require_running(status)
        user, _, host = parsed.args[0].rpartition("@")
        if not host or host.startswith("-") or user.startswith("-"):
            raise UsageError(f"{ctx.quoted(parsed.args[0])} is not [user@]host")
        address = host if is_ip(host) else resolve(context, host)[0]
        peer = next((one for one in ctx.peers_of(status) if address in (one.get("TailscaleIPs") or [])), {})
        words = ["ssh", *_options(context, status, peer, host)]
        _execute([*words, "--", f"{user}@{address}" if user else address, *parsed.args[1:]])

    return Command("ssh", "Log in to a peer", run, usage="[user@]<host> [args...]", max_args=-1, stops_at_word=True)


def _options(context: ctx.Context, status: dict[str, Any], peer: dict[str, Any], host: str) -> list[str]:
    name = str(peer.get("DNSName") or "").rstrip(".") or host
    options = ["-o", f"HostKeyAlias={name}", "-o", "CanonicalizeHostname=no"]
    keys = [str(key) for key in peer.get("sshHostKeys") or []]
    if keys:
        options += ["-o", f'UserKnownHostsFile="{_known_hosts(name, keys)}"']
        options += ["-o", "UpdateHostKeys=no", "-o", "StrictHostKeyChecking=yes"]
    if not status.get("TUN"):
        socket = [f"--socket={context.socket_path}"] if context.socket_path else []
        proxy = shlex.join([sys.executable, "-m", "tsctl", *socket, "nc"]).replace("%", "%%")
        options += ["-o", f"ProxyCommand={proxy} %h %p"]
    return options


def _known_hosts(name: str, keys: list[str]) -> str:
    """A file of this peer's keys, written anew each time; ssh closes all that could be handed over without a file."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = os.path.join(cache, "tsctl", f"known_hosts.{name.replace('/', '_')}")
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(beside, "w", encoding="utf-8") as file:
            file.writelines(f"{name} {' '.join(key.split())}\n" for key in keys)
        os.replace(beside, path)
    except OSError as error:
        raise Failure(f"cannot write the peer's host keys to {path}: {error.strerror}; set XDG_CACHE_HOME") from None
    return path


def _execute(words: list[str]) -> None:
    try:
        os.execvp(words[0], words)
    except OSError as error:
        raise Failure(f"cannot run ssh: {error.strerror}; install an SSH client, such as openssh-client") from None


COMMANDS = {"ssh": ssh_command}

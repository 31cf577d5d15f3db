"""What we call our things on a Linux host: interface, routing table, rule priorities, packet marks, nft table.

Own names everywhere, so that a real tailscaled (table 52, priorities 52xx, marks under 0xff0000 with other values) and
a second tsd can run beside us. Every running daemon of a network namespace holds one slot, by an abstract Unix socket
that the kernel releases with the process; the slot number moves table, priorities and nft table.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass

from tsd.base.errors import HullError

MARK_MASK = 0x300000
SUBNET_MARK = 0x100000
"""On packets that came out of the tunnel and are forwarded: they may be masqueraded."""
BYPASS_MARK = 0x200000
"""On our own sockets: they never enter the tunnel."""

SLOTS = 8
_TABLE, _EXIT_TABLE, _PRIORITY, _PRIORITY_STEP = 53, 63, 5300, 100


@dataclass(frozen=True, slots=True)
class HostNames:
    """The names of one slot; `device` is the interface."""

    device: str
    slot: int = 0

    @property
    def table(self) -> int:
        return _TABLE + self.slot

    @property
    def priority(self) -> int:
        """Rules of this slot lie in [priority, priority + 100)."""
        return _PRIORITY + _PRIORITY_STEP * self.slot

    @property
    def exit_table(self) -> int:
        """Default routes of an exit node."""
        return _EXIT_TABLE + self.slot

    @property
    def exit_priority(self) -> int:
        """After the routes of every slot: other tailnets of this host are not behind our exit node."""
        return _PRIORITY + _PRIORITY_STEP * (SLOTS + 1) + self.slot

    @property
    def nft_table(self) -> str:
        return "tsd" if self.slot == 0 else f"tsd{self.slot}"


class SlotClaim:
    """One slot of this network namespace, held until `close` or the end of the process."""

    def __init__(self, names: HostNames, sock: socket.socket) -> None:
        self.names = names
        self._sock = sock

    def close(self) -> None:
        self._sock.close()


def claim_slot(device: str) -> SlotClaim:
    """The slot that the device's number asks for, or the next free one. Raises `HullError` when all are taken."""
    digits = device[len(device.rstrip("0123456789")) :]
    wanted = int(digits) % SLOTS if digits else 0
    for step in range(SLOTS):
        claim = try_slot((wanted + step) % SLOTS, device)
        if claim is not None:
            return claim
    raise HullError(f"set up {device}", f"{SLOTS} daemons run in this network namespace already", "stop one of them")


def try_slot(slot: int, device: str = "") -> SlotClaim | None:
    """That slot, unless a running daemon holds it. Raises `HullError`."""
    sock = claim_name(f"slot.{slot}")
    return SlotClaim(HostNames(device, slot), sock) if sock is not None else None


def claim_name(what: str) -> socket.socket | None:
    """Something that only one tsd of a network namespace may have, held while the socket is open; None: taken.

    Raises `HullError`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sock.bind(f"\0tsd.{what}")
    except OSError as err:
        sock.close()
        if err.errno == errno.EADDRINUSE:
            return None
        raise HullError(f"claim {what}", os.strerror(err.errno or 0), errno=err.errno or 0) from None
    return sock

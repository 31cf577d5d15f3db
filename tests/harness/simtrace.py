"""What went over the simulated internet: a running hash of every datagram, and the last ones as a sequence diagram."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from typing import NamedTuple

from tsd.disco.box import is_disco

_WIREGUARD = {1: "wg init", 2: "wg resp", 3: "wg cookie", 4: "wg data"}
_DISCO = {124: "disco ping", 110: "disco pong"}


class Seen(NamedTuple):
    at: float
    sender: str
    receiver: str
    what: str
    fate: str
    """"" = delivered (or still under way), else why not."""


def kind_of(datagram: bytes) -> str:
    """The kind of a datagram by its first bytes."""
    if len(datagram) >= 20 and datagram[4:8] == b"\x21\x12\xa4\x42" and datagram[0] & 0xC0 == 0:
        return "stun request" if datagram[0] == 0 else "stun answer"
    if is_disco(datagram):
        return _DISCO.get(len(datagram), "disco call")
    if len(datagram) == 32 and datagram[0] == 4:
        return "wg keepalive"
    return _WIREGUARD.get(datagram[0] if datagram else 0, "?")


class Trace:
    """`digest` depends on every datagram, its time, its ends and its fate; `kinds` counts them per sender."""

    def __init__(self, keep: int = 600) -> None:
        self.last: deque[Seen] = deque(maxlen=keep)
        self.kinds: Counter[tuple[str, str]] = Counter()
        self.count = 0
        self.listeners: list[deque[Seen]] = []
        self._hash = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def datagram(self, at: float, sender: str, receiver: str, data: bytes, fate: str = "") -> None:
        what = kind_of(data)
        self.count += 1
        self.kinds[sender, what] += 1
        self._hash.update(f"{at:.9f} {sender} {receiver} {fate} ".encode())
        self._hash.update(data)
        self.last.append(Seen(at, sender, receiver, f"{what} {len(data)}", fate))

    def note(self, at: float, host: str, text: str) -> None:
        """Something that is no datagram: a change of the network, a TCP connection."""
        self.last.append(Seen(at, host, "", text, ""))

    def sent(self, sender: str, what: str) -> int:
        """How many datagrams of a kind a host has sent."""
        return self.kinds[sender, what]

    def diagram(self, count: int = 80) -> str:
        """The last datagrams: time, who -> whom, what; the same line repeated is counted."""
        lines: list[str] = []
        before: tuple[str, ...] = ()
        repeated = 0
        for seen in list(self.last)[-count:]:
            arrow = f"{seen.sender:>10} {'-x' if seen.fate else '->'} {seen.receiver:<10}" if seen.receiver else ""
            text = f"{seen.what}{' (' + seen.fate + ')' if seen.fate else ''}"
            key = (seen.sender, seen.receiver, text)
            if key == before:
                repeated += 1
                lines[-1] = f"{lines[-1].split(' ×')[0]} ×{repeated + 1}"
                continue
            before, repeated = key, 0
            lines.append(f"{seen.at:11.4f}  {arrow or '   --- ' + seen.sender + ':'} {text}")
        return "\n".join(lines)

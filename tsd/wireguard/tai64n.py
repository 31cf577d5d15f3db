"""TAI64N timestamps of initiations, which must never go back (wireguard-go: `tai64n/tai64n.go`).

The low 24 bits of the nanoseconds are cleared, so a step is 16.8 ms. Responders refuse a stamp that is not greater
than the last one they saw from us, also after we restarted: hence `last_ns`, which the engine stores and restores.
"""

from __future__ import annotations

TAI64N_BYTES = 12
_TAI_EPOCH_S = 0x400000000000000A
_SECOND_NS = 1_000_000_000
_STEP_NS = 1 << 24


def encode(unix_ns: int) -> bytes:
    seconds, nanoseconds = divmod(unix_ns, _SECOND_NS)
    return (_TAI_EPOCH_S + seconds).to_bytes(8, "big") + (nanoseconds & ~(_STEP_NS - 1)).to_bytes(4, "big")


def decode_s(stamp: bytes) -> int:
    """Unix seconds of a stamp, for logs."""
    return int.from_bytes(stamp[:8], "big") - _TAI_EPOCH_S


class Tai64nSource:
    """Strictly increasing stamps, whatever the wall clock does."""

    def __init__(self, last_ns: int = 0) -> None:
        self.last_ns = last_ns
        """Of the last stamp given out (or restored): store it, so that a restart with an older clock still works."""

    def stamp(self, wall_ns: int) -> bytes:
        value = encode(max(wall_ns, 0))
        if value <= encode(self.last_ns):
            wall_ns = self.last_ns + _STEP_NS
            # Clearing bits within a new second can swallow the step.
            while (value := encode(wall_ns)) <= encode(self.last_ns):
                wall_ns += _STEP_NS
        self.last_ns = max(wall_ns, 0)
        return value

"""tsd whose whole interpreter can be stopped: SIGUSR2 holds the GIL inside one C call for `STALL_S` seconds."""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from types import FrameType

STALL_S = 5


def _stall(number: int, frame: FrameType | None) -> None:
    print("stalled", time.time(), file=sys.stderr, flush=True)
    ctypes.PyDLL(None).usleep(STALL_S * 1_000_000)
    print("going on", time.time(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, _stall)
    from tsd.daemon.cli import main

    sys.exit(main())

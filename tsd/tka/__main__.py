"""`python -m tsd.tka`: what tsctl needs of cryptography, in a process of its own, so that tsctl itself starts fast.

Lines on standard input, one answer each in hex: `value SECRET` is the disablement value of a secret, `public SEED` the
public key of an Ed25519 seed.
"""

from __future__ import annotations

import sys

from tsd.base.keys import LockPrivate
from tsd.tka.state import disablement_value


def main() -> None:
    for line in sys.stdin:
        kind, _, text = line.strip().partition(" ")
        raw = bytes.fromhex(text)
        print((disablement_value(raw) if kind == "value" else LockPrivate(raw).public().raw).hex())


if __name__ == "__main__":
    main()

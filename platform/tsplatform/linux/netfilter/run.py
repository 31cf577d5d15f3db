"""Running the firewall's own programs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from tsd.base.errors import HullError
from tsplatform.linux.programs import environment

Run = Callable[[Sequence[str], str], str]
"""`run(words, input)` gives what was printed. Raises `HullError`. Tests bring their own."""

_TIMEOUT_S = 20.0
NO_PROGRAM = 127


_UNSUPPORTED = ("not supported", "can't initialize", "modprobe", "module", "insmod")
_NO_KERNEL = "the kernel lacks what it needs: modprobe nf_tables, or --netfilter-mode=off"


def run_program(words: Sequence[str], text: str) -> str:
    env = {**environment(), "LC_ALL": "C"}  # what is said on errors is looked at
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=env
        )
    except FileNotFoundError:
        hint = "install nftables or iptables, or use --netfilter-mode=off"
        raise HullError("firewall", f"{words[0]} is not installed", hint, NO_PROGRAM) from None
    except (OSError, subprocess.TimeoutExpired) as err:
        raise HullError(f"firewall: {words[0]}", str(err)) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[:300]
        hint = _NO_KERNEL if any(word in said.lower() for word in _UNSUPPORTED) else ""
        raise HullError(f"firewall: {words[0]}", said or f"exit {done.returncode}", hint)
    return done.stdout

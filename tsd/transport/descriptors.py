"""The limit of open descriptors: each connection is one, or two, and the usual soft limit of 1024 is soon reached.

That limit is for programs that use select(2); Go's runtime lifts it in the same way.
"""

from __future__ import annotations

import contextlib

_DARWIN_MAX = 10240


def lift_descriptor_limit() -> int:
    """Take all the descriptors that this process may have; returns how many that is, 0 for unknown. Never raises."""
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, _DARWIN_MAX):  # macOS refuses "unlimited", which is what it gives as the hard one
        if soft == wanted:
            break
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft

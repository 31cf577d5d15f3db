"""Which hull a `--tun` value leads to on this machine.

The list is tried in order, as in the field. A device that cannot be made is no reason to stop when
`userspace-networking` is in the list: restricted containers get it, with one line that says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tsd.base.errors import HullError
from tsd.hull import Hull

log = logging.getLogger(__name__)

USERSPACE_TUN = "userspace-networking"


def choose_hull(tun: str, kernel: Callable[[str], Hull], userspace: Callable[[], Hull]) -> Hull:
    """The first entry that works. Raises `HullError` with the reasons of all when none does."""
    reasons: list[str] = []
    for device in (part.strip() for part in tun.split(",")):
        if device == USERSPACE_TUN:
            if reasons:
                log.warning("userspace networking is used instead of a network device: %s", "; ".join(reasons))
            hull = userspace()
            hull.fallback_because = "; ".join(reasons)
            return hull
        try:
            if device.startswith("tap:"):
                raise HullError(f"create {device}", "TAP devices are not supported", "use a TUN name such as tsd0")
            return kernel(device)
        except HullError as err:
            reasons.append(str(err))
    raise HullError(f"--tun={tun}", "; ".join(reasons), f"--tun={USERSPACE_TUN} needs neither device nor rights")

"""Logging: stdlib, one logger per room, fixed field names appended as key=value.

Fields in use: peer, path, endpoint, derp_region, session, reason. Per-packet lines are TRACE and only behind
`isEnabledFor`; INFO is a change the user can see; WARNING is worth waking someone.
"""

import logging

TRACE = 5
logging.addLevelName(TRACE, "TRACE")


def fields(message: str, **values: object) -> str:
    """`message` followed by ` key=value` pairs in the order given; None values are left out."""
    return message + "".join(f" {name}={value}" for name, value in values.items() if value is not None)


class DropCounter(dict[str, int]):
    """Counts dropped input by reason; reading an unknown reason gives 0."""

    def __missing__(self, reason: str) -> int:
        return 0

    def add(self, reason: str, count: int = 1) -> None:
        self[reason] = self[reason] + count

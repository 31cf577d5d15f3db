"""The shape of every sans-IO machine.

Inputs are verbs that take bytes and `now` and return nothing; outputs are drained afterwards in one ordered
list. A machine never awaits, opens, sleeps or rolls dice, and hostile bytes never raise out of an input:
they are counted and dropped.
"""

from typing import Any, NamedTuple, Protocol


class Deadline(NamedTuple):
    """When a machine wants `on_deadline(now)` to be called, and why (for logs)."""

    at: float
    reason: str


class Machine(Protocol):
    """What a driver needs to run a machine; events are frozen dataclasses named in past participle."""

    def next_deadline(self) -> Deadline | None:
        """Never earlier than the last `now` the machine was given."""

    def on_deadline(self, now: float) -> None: ...

    def take_outputs(self) -> list[Any]:
        """All outputs since the last call, oldest first."""


def earliest(*deadlines: Deadline | None) -> Deadline | None:
    """The first of several deadlines, ignoring absent ones."""
    return min((d for d in deadlines if d is not None), default=None, key=lambda d: d.at)

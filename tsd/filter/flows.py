"""Flows that we started, so that their answers may come in: the 512 most recently used, without a timeout."""

from __future__ import annotations

MAX_FLOWS = 512

Flow = tuple[int, bytes, int, bytes, int]
"""(proto, source, source port, destination, destination port) of the packets to be let in."""


class FlowTable:
    """Least recently used goes first. Shared by filters that follow one another."""

    __slots__ = ("_flows", "_newest")

    def __init__(self) -> None:
        self._flows: dict[Flow, None] = {}
        self._newest: Flow | None = None

    def __len__(self) -> int:
        return len(self._flows)

    def add(self, flow: Flow) -> None:
        if flow == self._newest:
            return
        self._flows.pop(flow, None)
        self._flows[flow] = None
        self._newest = flow
        if len(self._flows) > MAX_FLOWS:
            del self._flows[next(iter(self._flows))]

    def touch(self, flow: Flow) -> bool:
        """Whether the flow is known; it then counts as used just now."""
        if flow not in self._flows:
            return False
        self.add(flow)
        return True

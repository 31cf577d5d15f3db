"""What the coordinator wants done, in order. `Save`s before an answer must be durable before the answer leaves."""

from __future__ import annotations

from dataclasses import dataclass

from tsd.tailcfg.register import RegisterResponse


@dataclass(frozen=True, slots=True)
class Save:
    """Write (or, with None, delete) one document of a table: users, auth_keys, nodes."""

    table: str
    key: int
    document: bytes | None


@dataclass(frozen=True, slots=True)
class RegisterAnswered:
    """Answer the register request that was handed in with `token`."""

    token: int
    response: RegisterResponse


@dataclass(frozen=True, slots=True)
class FrameReady:
    """Send one map message (JSON) on a poll."""

    session: int
    message: bytes


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Close a poll: its node is gone."""

    session: int


@dataclass(frozen=True, slots=True)
class ApprovalWanted:
    """A node waits for the administrator."""

    auth_id: str
    hostname: str


Event = Save | RegisterAnswered | FrameReady | SessionEnded | ApprovalWanted

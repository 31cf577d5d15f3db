"""The chain of tailnet lock in the state store, one for each profile.

Lines of base64, in the order in which the updates were taken. The whole chain is verified again when it is read: the
file is trusted no more than a server is.
"""

from __future__ import annotations

import base64

from tsd.base.errors import DecodeError
from tsd.engine.account.profiles import LOCK_KEY
from tsd.hull import StateStore
from tsd.tka.authority import Authority


def read(store: StateStore, profile_id: str) -> Authority | None:
    """None when there is none. Raises `TsdError` when what is there cannot be used."""
    raw = store.get(LOCK_KEY + profile_id) if profile_id else None
    if not raw:
        return None
    try:
        updates = [base64.b64decode(line, validate=True) for line in raw.split()]
    except ValueError:
        raise DecodeError("tka", "a line that is not base64") from None
    return Authority.replay(updates)


def write(store: StateStore, profile_id: str, authority: Authority | None) -> None:
    """None deletes."""
    lines = [base64.b64encode(raw) for raw in authority.encode_all()] if authority is not None else []
    store.put(LOCK_KEY + profile_id, b"\n".join(lines) or None)

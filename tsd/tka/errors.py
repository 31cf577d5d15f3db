"""Why tailnet lock refuses something that could be read."""

from __future__ import annotations

from tsd.base.errors import TsdError


class LockRefused(TsdError):
    """A signature, a key or a change that the rules of tailnet lock do not allow."""

"""What a coordination server means when it refuses a login (headscale: hscontrol/auth.go, types/preauth_key.go)."""

from __future__ import annotations

_REFUSALS = (
    ("already used", "the auth key was for single use and has been used; make a new one"),
    ("authkey expired", "the auth key has expired; make a new one"),
    ("authkey revoked", "the auth key was revoked; make a new one"),
    ("invalid pre auth key", "the server does not know this auth key"),
    ("invalid authkey", "the server does not know this auth key"),
    ("invalid key", "the server does not accept this auth key"),
    ("not valid", "the server does not accept this auth key"),
    ("different machine key", "this node key belongs to another machine; log in with a new one (--force-reauth)"),
    ("already in use by another machine", "this node key belongs to another machine; log in anew (--force-reauth)"),
    ("registration timed out", "the login was not completed in time; try again"),
)


def explain_refusal(error: str) -> str:
    """The server's `Error` in plain words, with its own text behind."""
    folded = error.lower()
    for part, text in _REFUSALS:
        if part in folded:
            return f"{text} (server: {error!r})"
    return f"the server refused the login: {error}"

"""Signatures of our own node key for registering in a locked tailnet (tailscale: control/controlclient/direct.go)."""

from __future__ import annotations

import base64
import logging

from tsd.base.errors import TsdError
from tsd.base.keys import LockPrivate, NodePublic
from tsd.base.log import fields
from tsd.tka.nodekey import rotated
from tsd.tka.wrapped import unwrap

log = logging.getLogger("tsd.engine.control")


class SigningError(TsdError):
    """Our node key cannot be signed here; the text says how to go on."""


def first_signature(auth_key: str, node_key: NodePublic) -> tuple[str, str]:
    """(the auth key as the server knows it, the signature that a wrapped one lets us make, or nothing)."""
    wrapped = unwrap(auth_key)
    if wrapped is None:
        return auth_key, ""
    try:
        return wrapped.auth_key, _text(wrapped.sign(node_key))
    except TsdError as err:
        log.warning(fields("the auth key's signature for tailnet lock is not used", reason=err))
        return wrapped.auth_key, ""


def rotated_signature(old: str, node_key: NodePublic, lock_key: LockPrivate | None) -> str:
    """For a new node key, from what admitted the old one. Raises `SigningError`."""
    try:
        if lock_key is None:
            raise SigningError("this node has no tailnet lock key")
        return _text(rotated(base64.b64decode(old, validate=True), node_key, lock_key.sign))
    except (TsdError, ValueError) as err:
        key = f" {lock_key.public()}" if lock_key is not None else ""
        remedy = f"sign the new key on a trusted node: tsctl lock sign {node_key}{key}"
        raise SigningError(f"cannot sign the new node key for tailnet lock: {err}; {remedy}") from None


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()

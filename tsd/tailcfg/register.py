"""Registration (tailscale: tailcfg/tailcfg.go, RegisterRequest and RegisterResponse)."""

from __future__ import annotations

import msgspec

from tsd.tailcfg.hostinfo import Hostinfo
from tsd.tailcfg.user import Login, User
from tsd.tailcfg.wire import CAPABILITY_VERSION, ZERO_TIME, Wire, always

LOGOUT_EXPIRY = "1970-01-01T00:02:03Z"
"""The expiry that means "log me out" (Unix second 123)."""


class RegisterAuth(Wire, frozen=True, gc=False):
    auth_key: str = ""


class RegisterRequest(Wire, frozen=True, gc=False):
    """The machine key is not in it: the server takes it from the Noise session."""

    version: int = always(CAPABILITY_VERSION)
    node_key: str = always("")
    old_node_key: str = always("nodekey:" + "0" * 64)
    nl_key: str = always("nlpub:" + "0" * 64)
    auth: RegisterAuth | None = None
    expiry: str = always(ZERO_TIME)
    followup: str = always("")
    hostinfo: Hostinfo | None = always(None)
    ephemeral: bool = False
    node_key_signature: str | None = always(None)
    signature_type: str | int = ""
    timestamp: str | None = None
    device_cert: str | None = None
    signature: str | None = None
    tailnet: str = ""


class RegisterResponse(Wire, frozen=True, gc=False):
    """`auth_url` empty and no `error`: done."""

    user: User = always(User())
    login: Login = always(Login())
    node_key_expired: bool = always(False)
    machine_authorized: bool = always(False)
    auth_url: str = always("")
    node_key_signature: str | None = always(None)
    error: str = always("")


class OverTLSPublicKeys(msgspec.Struct, frozen=True, gc=False):
    """Answer of `GET /key`; both are `mkey:` texts, the legacy one may be missing or zero."""

    legacyPublicKey: str = ""
    publicKey: str = ""

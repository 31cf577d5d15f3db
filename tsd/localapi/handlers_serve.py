"""Serve config with its tag, feature query, certificates (tailscale: `ipn/localapi/serve.go`, `cert.go`).

The tag is the SHA-256 of the exact JSON that GET prints. A config that reaches a file or a Unix socket is accepted
only from root, or from an operator who may become root by sudo.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from urllib.parse import unquote

from tsd.base.errors import TsdError
from tsd.localapi import permissions
from tsd.localapi.backend import ApiError, EtagMismatch, Json
from tsd.localapi.call import JSON, Call, Endpoint, Response, json_error, text
from tsd.localapi.call import compact as compact_json
from tsd.localapi.schema import parse_duration

NEEDS_ROOT = "must be root, or be an operator and able to run 'sudo tailscale' to serve a path or Unix socket"


async def serve_config(call: Call) -> Response:
    if call.method == "GET":
        raw = call.backend.serve_config() or b"null"
        return Response(200, raw, JSON, (("Etag", hashlib.sha256(raw).hexdigest()),))
    if call.method != "POST":
        return text(405, "use GET or POST")
    if not call.can_write:
        return text(403, "serve config denied")
    raw = await call.body.read()
    try:
        config = json.loads(raw)
        if config is not None and not isinstance(config, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        return json_error(500, f"decoding config: {error}")
    if config and reaches_files(config) and not await _may_reach_files(call):
        return text(401, NEEDS_ROOT)
    try:
        await call.backend.set_serve_config(raw, call.head.get("If-Match"))
    except EtagMismatch:
        return text(412, "etag mismatch")
    except ApiError:
        raise
    except TsdError as error:
        return json_error(500, f"updating config: {error}")
    return Response(200)


async def _may_reach_files(call: Call) -> bool:
    if call.caller.uid == 0 or not permissions.has_peer_credentials():
        return True
    if not permissions.is_operator(call.caller, call.backend.operator_user()):
        return call.daemon_uid != 0 and call.caller.uid == call.daemon_uid
    return await asyncio.to_thread(permissions.may_become_root, call.caller)


def reaches_files(config: Json) -> bool:
    """Whether a serve config, at any depth, serves a file path or forwards to a Unix socket."""
    todo: list[object] = [config]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            for key, item in value.items():
                name = str(key).lower()
                if name == "path" and item:
                    return True
                if name in ("proxy", "tcpforward") and str(item).lower().startswith("unix:"):
                    return True
                todo.append(item)
    return False


async def query_feature(call: Call) -> Response:
    feature = call.value("feature")
    if not feature:
        return text(500, "missing feature")
    return compact_json(await call.backend.query_feature(feature))


async def cert(call: Call) -> Response:
    if not call.can_write and not permissions.may_fetch_cert(call.caller):
        return text(403, "cert access denied")
    domain = unquote(call.path.removeprefix("cert/"))
    labels = domain.split(".")
    if not domain or any(not label or set(label) & set("/\\:") for label in labels):
        return text(500, "invalid domain")
    validity_s = parse_duration(call.value("min_validity") or "0")
    if validity_s is None:
        return text(400, "invalid 'min_validity' parameter")
    kind = call.value("type") or "crt"
    pem = await call.backend.cert(domain, "crt" if kind == "cert" else kind, validity_s)
    return Response(200, pem, "text/plain")


ENDPOINTS = (
    Endpoint("serve-config", serve_config),
    Endpoint("query-feature", query_feature, methods=("POST",), wrong_method=(405, "use POST")),
    Endpoint("cert/", cert),
)

"""Tailnet lock (tailscale: `ipn/localapi/tailnetlock.go`): paths, statuses and the words before each reason are its."""

from __future__ import annotations

import base64
import json
from typing import Any

from tsd.base.errors import DecodeError, TsdError
from tsd.base.keys import LockPrivate, NodePublic
from tsd.engine.lock.orders import INACTIVE, LockOrders
from tsd.localapi.backend import ApiError
from tsd.localapi.call import Call, Endpoint, Handler, Response, empty, pretty, text
from tsd.tka.aum import HASH_BYTES, parse_hash
from tsd.tka.key import ED25519, Key

_MODIFY = "tailnet-lock modify access denied"
_BAD_JSON = "invalid JSON body"
MAX_BODY_BYTES = 1 << 20
BINARY = "application/octet-stream"


def _orders(call: Call, failure: str, status: int = 500) -> LockOrders:
    orders = call.backend.lock()
    if orders is None:
        raise ApiError(status, f"{failure}{INACTIVE}")
    return orders


class _Failing:
    """`with _Failing("signing failed: "):` a refusal becomes an answer with these words before it."""

    def __init__(self, words: str, status: int = 500) -> None:
        self._words, self._status = words, status

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TsdError) and not isinstance(error, ApiError):
            raise ApiError(self._status, f"{self._words}{error}") from None


def _octets(value: Any, complaint: str = _BAD_JSON) -> bytes:
    try:
        return base64.b64decode(value or "", validate=True)
    except (ValueError, TypeError):
        raise ApiError(400, complaint) from None


def _list(value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ApiError(400, _BAD_JSON)
    return value or []


def _keys(value: Any) -> tuple[Key, ...]:
    """Keys as Go writes them."""
    found = []
    for entry in _list(value):
        if not isinstance(entry, dict):
            raise ApiError(400, _BAD_JSON)
        votes, kind, meta = entry.get("Votes", 0), entry.get("Kind", ED25519), entry.get("Meta")
        is_sound = isinstance(votes, int) and votes >= 0 and isinstance(kind, int) and 0 <= kind < 256
        if not is_sound or not (meta is None or _is_texts(meta)):
            raise ApiError(400, _BAD_JSON)
        found.append(Key(_octets(entry.get("Public")), votes, kind, meta))
    return tuple(found)


def _is_texts(meta: Any) -> bool:
    return isinstance(meta, dict) and all(isinstance(part, str) for pair in meta.items() for part in pair)


async def _body(call: Call) -> bytes:
    return await call.body.read(MAX_BODY_BYTES)


# --- looking


async def status(call: Call) -> Response:
    return pretty(call.backend.tka_status())


async def log(call: Call) -> Response:
    limit = call.value("limit") or "50"
    try:
        count = int(limit)
    except ValueError:
        return text(400, f"parsing 'limit' parameter: {json.dumps(limit)} is not a number")
    words = "reading log failed: "
    with _Failing(words):
        return pretty(_orders(call, words).log(max(count, 0)))


async def affected(call: Call) -> Response:
    key_id = await _body(call)
    with _Failing(""):
        found = await _orders(call, "").affected(key_id)
    return pretty([base64.b64encode(raw).decode() for raw in found])


async def verify_deeplink(call: Call) -> Response:
    request = await call.read_object("invalid JSON for verifyRequest body")
    orders = call.backend.lock()
    url = request.get("URL")
    if orders is None or not isinstance(url, str):
        return pretty({"IsValid": False, "Error": INACTIVE})
    return pretty(orders.check_deeplink(url))


# --- changing


async def init(call: Call) -> Response:
    request, words = await call.read_object(_BAD_JSON), "initialization failed: "
    orders = _orders(call, words)
    if not orders.is_allowed:
        return text(403, "Tailnet Lock is not supported on your pricing plan")
    keys, values = _keys(request.get("Keys")), tuple(map(_octets, _list(request.get("DisablementValues"))))
    with _Failing(words):
        await orders.init(keys, values, _octets(request.get("SupportDisablement")))
    return pretty(call.backend.tka_status())


async def modify(call: Call) -> Response:
    request, words = await call.read_object(_BAD_JSON), "tailnet-lock modify failed: modify tailnet-lock keys: "
    add, remove = _keys(request.get("AddKeys")), _keys(request.get("RemoveKeys"))
    with _Failing(words):
        await _orders(call, words).modify(add, tuple(key.id for key in remove))
    return empty()


async def sign(call: Call) -> Response:
    request, words = await call.read_object(_BAD_JSON), "signing failed: "
    try:
        node_key = NodePublic.parse(str(request.get("NodeKey")))
    except DecodeError:
        return text(400, _BAD_JSON)
    rotation = _octets(request.get("RotationPublic"))
    with _Failing(words):
        await _orders(call, words).sign(node_key, rotation)
    return Response(200)


async def disable(call: Call) -> Response:
    secret, words = await _body(call), "tailnet-lock disable failed: "
    with _Failing(words, 400):
        await _orders(call, words, 400).disable(secret)
    return Response(200)


async def disable_here(call: Call) -> Response:
    await call.read_object(_BAD_JSON)
    words = "tailnet-lock local disable failed: "
    with _Failing(words, 400):
        _orders(call, words, 400).disable_here()
    return Response(200)


async def wrap_auth_key(call: Call) -> Response:
    request = await call.read_object(_BAD_JSON)
    try:
        signer = LockPrivate.parse(str(request.get("TKAKey")))
    except DecodeError:
        return text(400, _BAD_JSON)
    with _Failing(""):
        wrapped = _orders(call, "").wrap_auth_key(str(request.get("TSKey")), signer)
    return Response(200, wrapped.encode(), "text/plain; charset=utf-8")


# --- recovering from a stolen key


async def revoke(call: Call) -> Response:
    request = await call.read_object("invalid JSON for verifyRequest body")
    fork = request.get("ForkFrom") or ""
    try:
        fork_from = parse_hash(fork) if isinstance(fork, str) and fork else None
    except DecodeError as err:
        return text(400, f"decoding fork-from: {err.reason}")
    key_ids = {_octets(key_id) for key_id in _list(request.get("Keys"))}
    with _Failing(""):
        made = _orders(call, "").revoke(key_ids, fork_from if fork_from != bytes(HASH_BYTES) else None)
    return Response(200, made, BINARY)


async def cosign(call: Call) -> Response:
    raw = await _body(call)
    with _Failing(""):
        return Response(200, _orders(call, "").cosign(raw), BINARY)


async def submit_recovery(call: Call) -> Response:
    raw = await _body(call)
    with _Failing(""):
        await _orders(call, "").submit_recovery(raw)
    return Response(200)


def _post(name: str, handler: Handler, denied: str = "") -> Endpoint:
    return Endpoint(
        f"tka/{name}",
        handler,
        needs_write=bool(denied),
        denied=denied,
        methods=("POST",),
        wrong_method=(405, "use POST"),
    )


ENDPOINTS = (
    Endpoint("tka/status", status, methods=("GET",), wrong_method=(405, "use GET")),
    Endpoint("tka/log", log, methods=("GET",), wrong_method=(405, "use GET")),
    _post("init", init, "lock init access denied"),
    _post("modify", modify, _MODIFY),
    _post("sign", sign, "lock sign access denied"),
    _post("wrap-preauth-key", wrap_auth_key, _MODIFY),
    _post("verify-deeplink", verify_deeplink),
    _post("disable", disable, _MODIFY),
    _post("force-local-disable", disable_here, _MODIFY),
    _post("affected-sigs", affected),
    _post("generate-recovery-aum", revoke, "access denied"),
    _post("cosign-recovery-aum", cosign, "access denied"),
    _post("submit-recovery-aum", submit_recovery, "access denied"),
)

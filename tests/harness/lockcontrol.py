"""A coordination server's side of tailnet lock, and a lone engine that lives in a locked tailnet."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from harness.lockkeys import SECRET, key_id, lock_key, new_genesis, sign_node
from harness.loneengine import Keys, LoneEngine, lone_engine, peer_json
from tsd.base.errors import ControlError
from tsd.base.keys import NodePublic
from tsd.engine.lock.exchange import Exchange
from tsd.tailcfg.mapresponse import decode_map_response
from tsd.tka.aum import AUM, hash_text, parse_hash
from tsd.tka.authority import Authority, Offer
from tsd.tka.key import Key
from tsd.tka.updater import changes

Json = dict[str, Any]


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def public(number: int) -> NodePublic:
    return Keys(number).node.public()


def signed_peer(number: int, signer: int = 1, **values: Any) -> Json:
    return peer_json(number, KeySignature=b64(sign_node(public(number), signer)), **values)


class LockControl:
    """Control's side of the lock; `asked` has the requests."""

    def __init__(self, *keys: Key) -> None:
        self.genesis: AUM | None = new_genesis(*keys)
        self.authority: Authority = Authority.bootstrap(self.genesis)
        self.secret = SECRET
        self.is_down = False
        self.asked: list[tuple[str, Json]] = []

    def info(self) -> Json:
        return {"Head": hash_text(self.authority.head)}

    def change(self, add: tuple[Key, ...] = (), remove: tuple[bytes, ...] = (), signer: int = 1) -> None:
        made = changes(self.authority, add, remove, key_id(signer), lock_key(signer).sign)
        self.authority = self.authority.inform(made)

    async def ask(self, path: str, request: Json) -> Json:
        self.asked.append((path, request))
        if self.is_down:
            raise ControlError("no answer (HTTP)")
        answer: Json = getattr(self, "do_" + path.replace("/", "_").replace("-", "_"))(request)
        return json.loads(json.dumps(answer))  # type: ignore[no-any-return]

    def do_bootstrap(self, request: Json) -> Json:
        genesis = {"GenesisAUM": b64(self.genesis.encode())} if self.genesis is not None else {}
        return {**genesis, "DisablementSecret": b64(self.secret)}

    def do_sync_offer(self, request: Json) -> Json:
        theirs = Offer(parse_hash(request["Head"]), tuple(map(parse_hash, request["Ancestors"])))
        ours = self.authority.offer()
        missing = [b64(aum.encode()) for aum in self.authority.missing_from(theirs)]
        return {"Head": hash_text(ours.head), "Ancestors": list(map(hash_text, ours.ancestors)), "MissingAUMs": missing}

    def do_sync_send(self, request: Json) -> Json:
        self.authority = self.authority.inform(AUM.decode(base64.b64decode(raw)) for raw in request["MissingAUMs"])
        return self.info()

    def do_sign(self, request: Json) -> Json:
        return {}

    def do_disable(self, request: Json) -> Json:
        return {}


@asynccontextmanager
async def locked(control: LockControl, **options: Any) -> AsyncIterator[LoneEngine]:
    async with lone_engine(is_up=False, **options) as lone:
        lone.engine.lock.exchange = Exchange(control.ask)
        lone.register()
        yield lone


async def first_map(lone: LoneEngine, control: LockControl, *peers: Json, **more: Any) -> None:
    await told(lone, lambda: lone.first_map(*peers, **({"TKAInfo": control.info()} | more)))


async def told(lone: LoneEngine, tell: Any) -> None:
    """Await what the engine wants awaited."""
    engine, waiting = lone.engine, []
    on_map = engine.on_map
    engine.on_map = lambda message, is_first: waiting.append(on_map(message, is_first))  # type: ignore[assignment]
    try:
        tell()
    finally:
        engine.on_map = on_map  # type: ignore[method-assign]
    for one in waiting:
        if one is not None:
            await one


async def tell(lone: LoneEngine, **message: Any) -> None:
    waiting = lone.engine.on_map(decode_map_response(json.dumps(message).encode()), False)
    if waiting is not None:
        await waiting


def refused(lone: LoneEngine) -> dict[int, str]:
    return {node_id: reason for node_id, (_, reason) in lone.engine.lock.refused.items()}


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

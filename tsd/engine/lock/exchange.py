"""What is said to control about tailnet lock (tailscale: tailcfg/tka.go). Updates and signatures travel as base64."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from tsd.base.errors import ControlError, DecodeError
from tsd.tka.aum import AUM, hash_text, parse_hash
from tsd.tka.authority import Authority, Offer

Json = dict[str, Any]
Ask = Callable[[str, Json], Awaitable[Json]]
"""(path under /machine/tka/, request) -> answer; adds who asks. Raises `ControlError`."""


class Exchange:
    """Every answer is taken apart here; raises `ControlError` or `DecodeError` for one that makes no sense."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def bootstrap(self, head: bytes | None) -> tuple[bytes, bytes]:
        """(first update of the lock, or nothing; the secret that switches it off, or nothing)."""
        answer = await self._ask("bootstrap", {"Head": hash_text(head) if head else ""})
        return octets(answer.get("GenesisAUM")), octets(answer.get("DisablementSecret"))

    async def offer(self, offer: Offer) -> tuple[Offer, list[bytes]]:
        """What control has, and the updates that it thinks we lack, as they came."""
        ancestors = [hash_text(made) for made in offer.ancestors]
        answer = await self._ask("sync/offer", {"Head": hash_text(offer.head), "Ancestors": ancestors})
        theirs = Offer(_hash(answer.get("Head")), tuple(map(_hash, _items(answer.get("Ancestors")))))
        return theirs, [octets(raw) for raw in _items(answer.get("MissingAUMs"))]

    async def send(self, head: bytes, updates: Sequence[AUM], *, is_interactive: bool = False) -> bytes:
        """Control's head afterwards."""
        missing = [_text(aum.encode()) for aum in updates]
        request = {"Head": hash_text(head), "MissingAUMs": missing, "Interactive": is_interactive}
        return _hash((await self._ask("sync/send", request)).get("Head"))

    async def init(self, genesis: AUM) -> list[Json]:
        """The nodes that have to be signed before control switches the lock on."""
        answer = await self._ask("init/begin", {"GenesisAUM": _text(genesis.encode())})
        wanted = _items(answer.get("NeedSignatures"))
        if not all(isinstance(entry, dict) for entry in wanted):
            raise DecodeError("tka", "a node to be signed that is not an object")
        return wanted

    async def finish_init(self, signatures: dict[str, bytes], support_disablement: bytes) -> None:
        request: Json = {"Signatures": {node_id: _text(raw) for node_id, raw in signatures.items()}}
        if support_disablement:
            request["SupportDisablement"] = _text(support_disablement)
        await self._ask("init/finish", request)

    async def submit(self, signature: bytes) -> None:
        await self._ask("sign", {"Signature": _text(signature)})

    async def disable(self, head: bytes, secret: bytes) -> None:
        await self._ask("disable", {"Head": hash_text(head), "DisablementSecret": _text(secret)})

    async def signatures_by(self, key_id: bytes) -> list[bytes]:
        answer = await self._ask("affected-sigs", {"KeyID": _text(key_id)})
        return [octets(raw) for raw in _items(answer.get("Signatures"))]


async def synced(exchange: Exchange, authority: Authority) -> Authority:
    """With what control has; control gets what we have. Raises `TsdError`."""
    theirs, missing = await exchange.offer(authority.offer())
    if theirs.head == authority.head:
        return authority
    ours = authority.missing_from(theirs)
    authority = await asyncio.to_thread(lambda: authority.inform(map(AUM.decode, missing)))
    await exchange.send(authority.head, ours)
    return authority


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def octets(value: Any) -> bytes:
    try:
        return base64.b64decode(value or "", validate=True)
    except (ValueError, TypeError):
        raise DecodeError("tka", "not base64 where an update or signature belongs") from None


def _hash(value: Any) -> bytes:
    return parse_hash(value if isinstance(value, str) else "")


def _items(value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise DecodeError("tka", "not a list where one belongs")
    return value or []


def checked(answer: object) -> Json:
    if not isinstance(answer, dict):
        raise ControlError("the answer about tailnet lock is not an object", status=200)
    return answer


def state_id_text(ids: Iterable[int]) -> str:
    """As the state file has those that are switched off on this node."""
    return ":".join(map(str, ids))

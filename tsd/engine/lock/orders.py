"""What users do with tailnet lock: on and off, trusted keys, signed nodes (tailscale: ipn/ipnlocal/tailnet-lock.go).

Everything is signed with this node's own lock key and handed to control; what comes of it arrives with the next netmap.
All raise `TsdError`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tsd.base.keys import LockPrivate, NodePublic
from tsd.engine.lock import told
from tsd.engine.lock.exchange import octets
from tsd.tka.aum import AUM
from tsd.tka.authority import Authority
from tsd.tka.deeplink import check_deeplink
from tsd.tka.errors import LockRefused
from tsd.tka.key import Key
from tsd.tka.nodekey import CREDENTIAL, NodeKeySignature, direct, parse_node_key
from tsd.tka.recovery import revocation
from tsd.tka.updater import changes, genesis
from tsd.tka.wrapped import wrap

if TYPE_CHECKING:
    from tsd.engine.engine import Engine

INACTIVE = "tailnet-lock is not active"
NOT_TRUSTED = "this node is not trusted by Tailnet Lock"
CAPABILITY = "https://tailscale.com/cap/tailnet-lock"


class LockOrders:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = engine.lock

    def _active(self) -> Authority:
        authority = self._lock.authority
        if authority is None:
            raise LockRefused(INACTIVE)
        return authority

    def _own_key(self) -> LockPrivate:
        key = self._engine.account.lock_key
        if key is None or self._engine.account.node_key is None:
            raise LockRefused("no node-key: is this node logged in?")
        return key

    # --- looking

    def status(self) -> dict[str, Any]:
        return told.status(self._engine)

    def log(self, limit: int) -> list[dict[str, Any]]:
        return told.log(self._active(), limit)

    @property
    def is_allowed(self) -> bool:
        """Whether control lets this node switch the lock on."""
        netmap = self._engine.tailnet.netmap
        return netmap is not None and netmap.self_node.has_cap(CAPABILITY)

    def check_deeplink(self, url: str) -> dict[str, Any]:
        authority = self._lock.authority
        return {"IsValid": False, "Error": INACTIVE} if authority is None else check_deeplink(authority, url)

    # --- changing

    async def init(self, keys: tuple[Key, ...], disablement_values: tuple[bytes, ...], support: bytes) -> None:
        """Switch it on, with all nodes that control has signed by us."""
        own = self._own_key()
        entropy = self._engine.options.entropy(16)
        state_id = int.from_bytes(entropy[:8], "little"), int.from_bytes(entropy[8:], "little")
        first = genesis(keys, disablement_values, state_id).signed_by(own.public().raw, own.sign)
        Authority.bootstrap(first)
        signatures = {}
        for node in await self._lock.exchange.init(first):
            node_key = NodePublic.parse(str(node.get("NodePublic")))
            rotation = octets(node.get("RotationPubkey"))
            signatures[str(node.get("NodeID"))] = direct(node_key, own.public().raw, rotation, own.sign)
        await self._lock.exchange.finish_init(signatures, support)

    async def sign(self, node_key: NodePublic, rotation_public: bytes) -> None:
        authority, own = self._active(), self._own_key()
        if not authority.is_trusted(own.public().raw):
            raise LockRefused(NOT_TRUSTED)
        if not any(rotation_public):
            rotation_public = b""  # the field's command line says none with 32 zeros
        await self._lock.exchange.submit(direct(node_key, own.public().raw, rotation_public, own.sign))

    async def modify(self, add: tuple[Key, ...], remove: tuple[bytes, ...]) -> None:
        authority, own = self._active(), self._own_key()
        if not authority.is_trusted(own.public().raw):
            raise LockRefused("this node does not have a trusted tailnet lock key")
        made = changes(authority, add, remove, own.public().raw, own.sign)
        if made:
            head = await self._lock.exchange.send(authority.head, made, is_interactive=True)
            if head != made[-1].hash():
                raise LockRefused("somebody else changed tailnet lock at the same time; try again")

    async def disable(self, secret: bytes) -> None:
        authority = self._active()
        if not await asyncio.to_thread(authority.state.is_disabled_by, secret):
            raise LockRefused("incorrect disablement secret")
        await self._lock.exchange.disable(authority.head, secret)

    def disable_here(self) -> None:
        """On this node only, for as long as this lock exists."""
        if not self._lock.ignore():
            raise LockRefused(INACTIVE)

    async def affected(self, key_id: bytes) -> list[bytes]:
        """Signatures that would end with the trust in a key; each is verified."""
        authority = self._active()
        found = await self._lock.exchange.signatures_by(key_id)
        for raw in found:
            signature = NodeKeySignature.decode(raw)
            if signature.authorizing_key_id != key_id:
                raise LockRefused("control gave a signature that another key made")
            authority.admit(parse_node_key(signature.pubkey), raw)
        return found

    def wrap_auth_key(self, auth_key: str, signer: LockPrivate) -> str:
        """For nodes that log in without anybody there: the key, and the power to sign with it."""
        self._active()
        private = Ed25519PrivateKey.from_private_bytes(self._engine.options.entropy(32))
        public = private.public_key().public_bytes_raw()
        credential = NodeKeySignature(CREDENTIAL, key_id=signer.public().raw, wrapping_pubkey=public)
        return wrap(auth_key, credential.signed_by(signer.sign), private)

    # --- recovering from a stolen key

    def revoke(self, key_ids: set[bytes], fork_from: bytes | None) -> bytes:
        authority, own = self._active(), self._own_key()
        made = revocation(authority, key_ids, own.public().raw, fork_from)
        return made.signed_by(own.public().raw, own.sign).encode()

    def cosign(self, raw: bytes) -> bytes:
        self._active()
        aum, own = AUM.decode(raw), self._own_key()
        if any(key_id == own.public().raw for key_id, _ in aum.signatures):
            raise LockRefused("this node has already signed this recovery AUM")
        return aum.signed_by(own.public().raw, own.sign).encode()

    async def submit_recovery(self, raw: bytes) -> None:
        self._active()
        aum = AUM.decode(raw)
        await self._lock.exchange.send(aum.hash(), [aum])

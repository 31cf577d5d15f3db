"""Tailnet lock on this node: its chain, kept up with control's, and the netmap without those whom nobody signed.

Once there is a chain it is enforced until a disablement secret proves that it is over, whatever control says. When
control says that the lock is on and no chain can be verified, no peer comes in: the lock fails closed.
tailscale: ipn/ipnlocal/tailnet-lock.go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from tsd.base.errors import TsdError
from tsd.base.log import fields
from tsd.engine.lock import exchange, keep
from tsd.engine.lock.exchange import Exchange, Json
from tsd.engine.lock.gate import Gate
from tsd.netmap.netmap import Netmap
from tsd.tailcfg.mapping import TKAInfo
from tsd.tailcfg.node import Node
from tsd.tka.aum import AUM, hash_text
from tsd.tka.authority import Authority
from tsd.tka.errors import LockRefused

if TYPE_CHECKING:
    from tsd.engine.engine import Engine

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long a netmap waits for the lock; afterwards it is worked in with what is known."""
RETRY_S, MAX_RETRY_S = 5.0, 300.0
LOGGED_PEERS = 20
"""So many that are newly kept out get a line each; the others are counted."""
LOCKED_OUT, UNVERIFIED, BEHIND = "tailnet-lock", "tailnet-lock-unverified", "tailnet-lock-behind"

Sifted = tuple[Netmap, tuple[int, ...] | None]


class TailnetLock:
    """`authority` is None while there is no chain."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.exchange = Exchange(self._ask)
        self._attempt: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._forget()

    def _forget(self) -> None:
        self._gate: Gate | None = None
        self._owner: str | None = None
        """ID of the profile that the chain belongs to; empty while it has none yet."""
        self._is_saved = True
        self._ignored: TKAInfo | None = None
        """A state of a lock that is switched off on this node; what control says later may be of another lock."""
        self._wanted: TKAInfo | None = None
        self._settled: TKAInfo | None = None
        self._sifted: tuple[Netmap | None, dict[int, str]] = None, {}
        """What was looked at last, and who was kept out of it."""
        self._unreadable = ""
        """Why the chain in the store cannot be used; that there is one is known all the same."""
        self._trouble = ""
        self._retry_s = RETRY_S

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._attempt is not None:
            self._attempt.cancel()

    def leave(self) -> None:
        """Another login follows."""
        self.close()
        self._forget()
        self._engine.health.clear(LOCKED_OUT, UNVERIFIED, BEHIND)

    # --- the chain

    @property
    def authority(self) -> Authority | None:
        self._load()
        return self._gate.authority if self._gate is not None else None

    @property
    def head_text(self) -> str:
        """As control is told; empty without a chain."""
        authority = self.authority
        return hash_text(authority.head) if authority is not None else ""

    def _load(self) -> None:
        profile_id = self._engine.profiles.current.id
        if self._owner is not None:
            if self._owner in ("", profile_id):
                self._owner = profile_id
                return
            self.leave()
        self._owner = profile_id
        try:
            found = keep.read(self._engine.options.hull.store, profile_id)
        except TsdError as err:
            self._unreadable = f"the stored chain cannot be used ({err})"
            log.error(fields("tailnet lock: the stored chain cannot be used; no peer comes in", reason=err))
            return
        if found is not None and not self._is_disallowed(found):
            self._gate = Gate(found)
            log.info(fields("tailnet lock is on", head=hash_text(found.head), keys=len(found.keys)))

    def adopt(self, authority: Authority | None) -> None:
        """Another state of the chain is in force; None: the lock is off."""
        if authority is not self.authority or self._unreadable:
            self._gate = Gate(authority) if authority is not None else None
            self._is_saved = False
            self._trouble = self._unreadable = ""
            log.info(fields("tailnet lock", head=hash_text(authority.head) if authority is not None else "off"))
        self.save()

    def save(self) -> None:
        """As soon as the login has a profile."""
        authority, profile_id = self.authority, self._engine.profiles.current.id
        if self._is_saved or not profile_id:
            return
        try:
            keep.write(self._engine.options.hull.store, profile_id, authority)
            self._is_saved = True
        except TsdError as err:
            self._engine.health.set("state-store-write", error=err)

    # --- keeping up with control

    def catch_up(self, wanted: TKAInfo | None, *, is_first: bool = False) -> Awaitable[None] | None:
        """What control says of the lock; None when that is how things are, else it should be awaited, if not for long.

        Never raises. Goes on trying in the background, and has the netmap looked at again when it comes to something.
        """
        self._wanted = wanted
        if is_first:
            self._settled = None
        if not self._is_behind():
            return None
        if self._attempt is None or self._attempt.done():
            self._start()
        assert self._attempt is not None
        return self._await(self._attempt)

    def _start(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._is_behind():
            self._attempt = asyncio.create_task(self._try())

    async def _await(self, attempt: asyncio.Task[None]) -> None:
        await asyncio.wait({attempt}, timeout=PATIENCE_S)

    def _is_behind(self) -> bool:
        authority, wanted = self.authority, self._wanted
        if wanted is None or wanted.disabled:
            self._trouble = ""
            return authority is not None and self._settled != TKAInfo(disabled=True)
        if wanted in (self._ignored, self._settled):
            return False
        return authority is None or hash_text(authority.head) != wanted.head

    async def _try(self) -> None:
        pause_s = 0.0
        try:
            await self._sync()
            self._retry_s = RETRY_S
            self._engine.health.clear(BEHIND)
        except TsdError as err:
            pause_s, self._retry_s = self._retry_s, min(self._retry_s * 2, MAX_RETRY_S)
            log.warning(fields("tailnet lock: no news from control", reason=err, retry_s=pause_s))
            self._trouble = str(err)
            self._engine.health.set_if(BEHIND, self.authority is not None, error=err)
        if self._is_behind():
            self._retry = asyncio.get_running_loop().call_later(pause_s, self._start)
        self._engine.tailnet.sift_anew()
        self._engine.report_self()

    async def _sync(self) -> None:
        wanted, authority = self._wanted, self.authority
        if wanted is None or wanted.disabled:
            if authority is not None:
                await self._disable(authority)
            self._settled = TKAInfo(disabled=True)
            return
        if authority is None:
            authority = await self._begin()
            if authority is None:
                self._ignored = wanted
                return
        self.adopt(await exchange.synced(self.exchange, authority))
        self._settled = wanted

    async def _begin(self) -> Authority | None:
        raw, _ = await self.exchange.bootstrap(None)
        if not raw:
            raise LockRefused("control says that tailnet lock is on, but gives no first update")
        genesis = AUM.decode(raw)
        authority = Authority.bootstrap(genesis)
        if self._is_disallowed(authority):
            log.warning("tailnet lock is switched off on this node (tsctl lock local-disable); all peers are let in")
            self._trouble = ""
            self.adopt(None)
            return None
        self.adopt(authority)
        return authority

    async def _disable(self, authority: Authority) -> None:
        _, secret = await self.exchange.bootstrap(authority.head)
        if await asyncio.to_thread(authority.state.is_disabled_by, secret):
            self.adopt(None)
        else:
            log.error("tailnet lock: control says that it is off, but its disablement secret is wrong; it stays on")

    @property
    def _disallowed(self) -> tuple[str, ...]:
        persist = self._engine.account.prefs.persist
        return persist.disallowed_tka_state_ids if persist is not None else ()

    def _is_disallowed(self, authority: Authority) -> bool:
        return exchange.state_id_text(authority.state_id) in self._disallowed

    async def _ask(self, path: str, request: Json) -> Json:
        control, key = self._engine.control, self._engine.account.node_key
        if control is None or key is None:
            raise LockRefused("no node-key: is this node logged in?")
        return exchange.checked(await control.ask_about_lock(path, {"NodeKey": str(key.public()), **request}))

    def ignore(self) -> bool:
        """Let everybody in, here, whatever this lock says; False when there is none.

        Another lock, begun after this one, will be obeyed. One that never told who it is, not before it changes.
        """
        authority, told = self.authority, self._engine.tailnet.told
        if authority is None and not self._unreadable and not (told is not None and self.is_enforced(told)):
            return False
        self.close()
        wanted = self._wanted or (told.tka if told is not None else None)
        if authority is not None:
            self._engine.account.disallow_lock(exchange.state_id_text(authority.state_id))
        if authority is None or (wanted is not None and wanted.head == hash_text(authority.head)):
            self._ignored = wanted
        self._settled, self._trouble = None, ""
        self.adopt(None)
        self._engine.health.clear(BEHIND)
        self._engine.tailnet.sift_anew()
        self._engine.report_self()
        self._start()
        return True

    # --- enforcement

    def is_enforced(self, told: Netmap) -> bool:
        """A netmap of an earlier run is taken as it is where a lock was off, until control says what it has."""
        if self.authority is not None or self._unreadable:
            return True
        is_recalled = self._wanted is None
        return told.is_locked and told.tka != self._ignored and not (is_recalled and self._disallowed)

    @property
    def refused(self) -> dict[int, tuple[Node, str]]:
        """Who is kept out, and why."""
        told, refused = self._sifted
        return {i: (told.peers[i], why) for i, why in refused.items()} if told is not None else {}

    def sift(self, told: Netmap, before: Netmap, touched: tuple[int, ...]) -> Generator[None, None, Sifted]:
        """The netmap without the peers that the lock keeps out. We ourselves always stay in it.

        `touched`: peers that differ from `before`. With it comes which can differ from what came out last; None: all.
        """
        refused: dict[int, str] = {}
        if self.is_enforced(told):
            if self._gate is not None:
                refused = yield from self._gate.refused(told, before, touched)
            else:
                reason = f"no signature can be verified: {self._blindness}"
                refused = {peer.id: reason for peer in told.peers.values() if not peer.unsigned_peerapi_only}
        seen, were_refused = self._sifted
        turned = refused.keys() ^ were_refused.keys() if refused is not were_refused else ()
        self._sifted = told, refused
        self._conclude(told)
        self._log([node_id for node_id in turned if node_id in refused])
        result = told
        if refused:
            result = replace(told, peers={i: node for i, node in told.peers.items() if i not in refused})
        return result, (*touched, *turned) if before is seen else None

    def _log(self, refused: list[int]) -> None:
        if self._gate is None or not refused:
            return
        told, reasons = self._sifted
        assert told is not None
        for node_id in refused[:LOGGED_PEERS]:
            name = told.peers[node_id].name.rstrip(".")
            log.warning(fields("tailnet lock keeps a peer out", peer=name, reason=reasons[node_id]))
        if len(refused) > LOGGED_PEERS:
            log.warning(fields("tailnet lock keeps more peers out", count=len(refused) - LOGGED_PEERS))

    def _conclude(self, told: Netmap) -> None:
        health, lock_key = self._engine.health, self._engine.account.lock_key
        public = str(lock_key.public()).replace("nlpub:", "tlpub:", 1) if lock_key is not None else ""
        health.set_if(LOCKED_OUT, self.own_refusal(told) != "", node_key=told.self_node.key, lock_key=public)
        is_blind = self._gate is None and self.is_enforced(told)
        health.set_if(UNVERIFIED, is_blind, error=self._blindness)

    @property
    def _blindness(self) -> str:
        return self._trouble or self._unreadable or "no answer from control yet"

    def own_refusal(self, told: Netmap) -> str:
        """Why other nodes keep us out; "" when they do not."""
        return self._gate.own_refusal(told.self_node) if self._gate is not None else ""

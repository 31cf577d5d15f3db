"""Questions that are not ours to answer: raced among upstreams, joined when they are equal, bounded in number.

An answer of SERVFAIL or REFUSED does not end the race; when all fail, the asker gets SERVFAIL (REFUSED when all
refused) with the reason in an extended DNS error. Rules: tailscale: net/dns/resolver/forwarder.go. Nothing is cached.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tsd.base.addr import IPAddress
from tsd.base.entropy import Entropy, system_entropy
from tsd.base.errors import reason_of
from tsd.base.log import fields
from tsd.dns import message, publicdns
from tsd.engine.names.doh import HTTPS_PORT, HttpsResolvers, tls_context
from tsd.engine.names.exchange import Dialing, Exchange, Protect, Reply
from tsd.engine.names.loops import LoopGuard
from tsd.engine.names.upstreams import Upstream, schedule
from tsd.hull import LinkState

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
MAX_CONCURRENT = 256
MAX_JOINED = 4096


class Answer(NamedTuple):
    """`upstream` and `transport` say who answered; empty when the reply is our own. `failure`: why nobody did."""

    wire: bytes
    upstream: str = ""
    transport: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a forwarder needs of its host; the defaults are those of a host that nobody else can ask through us."""

    protect: Protect = lambda sock: None
    links: Callable[[], LinkState] = LinkState
    can_loop: bool = False
    """Whether a resolver of the host could have us as its upstream."""
    entropy: Entropy = system_entropy
    provider_of: Callable[[IPAddress], publicdns.Provider | None] = publicdns.provider_of
    addresses_of: Callable[[str], tuple[IPAddress, ...]] = publicdns.addresses_of
    tls_context: Callable[[], ssl.SSLContext] = tls_context
    https_port: int = HTTPS_PORT


@dataclass(slots=True)
class _Race:
    """What came of one question so far."""

    servfail: bytes | None = None
    refused: bytes | None = None
    is_only_refused: bool = True
    reasons: list[str] = field(default_factory=list)
    answered: bool = False
    """Whether any upstream said anything at all."""


class Forwarder:
    """One per engine. `own_addresses` are never asked. `on_failing` is told which upstreams are silent, "" when not."""

    def __init__(self, dialer: Dialing, surroundings: Surroundings | None = None) -> None:
        given = surroundings or Surroundings()
        self._given = given
        self._exchange = Exchange(dialer, given.protect)
        self._https = HttpsResolvers(dialer, given.addresses_of, given.tls_context, given.https_port)
        self._running: dict[tuple[bytes, bool, tuple[str, ...]], asyncio.Task[Answer]] = {}
        self._joined = 0
        self.own_addresses: frozenset[IPAddress] = frozenset()
        self.loops = LoopGuard(
            lambda: given.links().addresses, given.entropy, lambda: asyncio.get_running_loop().time()
        )
        self.loops.is_possible = given.can_loop
        self._looping: dict[str, None] = {}
        self.on_failing: Callable[[str], None] = lambda servers: None
        self.on_loop: Callable[[str], None] = lambda servers: None
        """Told which upstreams ask us in turn, "" when none does any more."""

    def close(self) -> None:
        for task in list(self._running.values()):
            task.cancel()
        self._https.close()

    async def ask(self, query: bytes, upstreams: Sequence[str], over_tcp: bool, suffix: str = "") -> Answer:
        """Always a reply with the query's number. `suffix` is the zone that is routed to these upstreams."""
        key = (query[2:], over_tcp, tuple(upstreams))
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= MAX_CONCURRENT:
                return _failure(query, "too many questions at once")
            task = self._running[key] = asyncio.ensure_future(self._forward(query, upstreams, over_tcp, suffix))
            task.add_done_callback(lambda done: self._running.pop(key, None))
        elif self._joined >= MAX_JOINED:
            return _failure(query, "too many questions at once")
        self._joined += 1
        try:
            answer = await asyncio.shield(task)
        finally:
            self._joined -= 1
        return answer._replace(wire=message.with_id(answer.wire, query[:2]))

    async def _forward(self, query: bytes, upstreams: Sequence[str], over_tcp: bool, suffix: str) -> Answer:
        targets = schedule(upstreams, self.own_addresses, self._given.provider_of)
        if not targets:
            return _failure(query, "no resolver to ask for this name")
        race = _Race()
        asked = message.with_payload_limit(query)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._race(targets, asked, over_tcp, suffix, race)
        except TimeoutError:
            answer = None
            race.is_only_refused = False
            race.reasons.append("no answer in time")
        if answer is not None:
            self.on_failing("")
            return answer
        if not race.answered:
            self.on_failing(", ".join(dict.fromkeys(target.text for target in targets)))
        reasons = "; ".join(race.reasons)
        if race.is_only_refused and race.refused is not None:
            return Answer(race.refused, failure=reasons)
        return Answer(race.servfail, failure=reasons) if race.servfail is not None else _failure(query, reasons)

    async def _race(
        self, targets: list[Upstream], query: bytes, over_tcp: bool, suffix: str, race: _Race
    ) -> Answer | None:
        """The first useful answer. A failure lets the next one start at once."""
        loop = asyncio.get_running_loop()
        waiting, running = list(targets), set[asyncio.Task[Answer]]()
        zero = loop.time()
        try:
            while waiting or running:
                while waiting and (not running or waiting[0].delay_s <= loop.time() - zero):
                    zero = min(zero, loop.time() - waiting[0].delay_s)
                    work = self._ask_one(waiting.pop(0), query, over_tcp, suffix)
                    running.add(asyncio.ensure_future(work))
                pause_s = waiting[0].delay_s - (loop.time() - zero) if waiting else None
                done, running = await asyncio.wait(running, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    answer = _judged(task, race)
                    if answer is not None:
                        return answer
                    if waiting:
                        zero = min(zero, loop.time() - waiting[0].delay_s)
        finally:
            for task in running:
                task.cancel()
                task.add_done_callback(_seen)
        return None

    async def _ask_one(self, upstream: Upstream, query: bytes, over_tcp: bool, suffix: str) -> Answer:
        """Raises OSError or TimeoutError whose text names the upstream."""
        numbered = message.with_id(query, self._given.entropy(2))
        try:
            if upstream.kind == "plain":
                await self._refuse_loop(upstream, suffix)
                reply = await self._exchange.ask(upstream.target, numbered, over_tcp)
            else:
                wire = await self._https.ask(upstream, numbered)
                if not message.answers(wire, numbered):
                    raise ConnectionError("answered something else")
                reply = Reply(wire, upstream.kind if upstream.kind == "https" else "http")
        except (OSError, TimeoutError) as err:
            log.debug(fields("upstream failed", endpoint=upstream.text, reason=err))
            raise ConnectionError(f"{upstream.text}: {_words(err)}") from None
        return Answer(reply.wire, upstream.text, reply.transport)

    async def _refuse_loop(self, upstream: Upstream, suffix: str) -> None:
        async def probe(name: str) -> object:
            from tsd.dns import wire

            question = wire.question(name, "TXT", int.from_bytes(self._given.entropy(2), "big"))
            return await self._exchange.ask(upstream.target, question, False)

        is_loop = await self.loops.is_loop(upstream.target, suffix, probe)
        if is_loop != (upstream.text in self._looping):
            if is_loop:
                self._looping[upstream.text] = None
            else:
                del self._looping[upstream.text]
            self.on_loop(", ".join(self._looping))
        if is_loop:
            raise ConnectionError("it asks this daemon in turn")


def _words(err: OSError | TimeoutError) -> str:
    return reason_of(err) or "no answer in time"


def _seen(task: asyncio.Task[Answer]) -> None:
    """Its failure, if any, is of no interest any more."""
    if not task.cancelled():
        task.exception()


def _judged(task: asyncio.Task[Answer], race: _Race) -> Answer | None:
    """A useful answer; None after noting what it was instead."""
    problem = task.exception()
    if problem is not None:
        race.is_only_refused = False
        race.reasons.append(str(problem))
        return None
    answer = task.result()
    race.answered = True
    rcode = message.rcode_of(answer.wire)
    if rcode not in (message.SERVFAIL, message.REFUSED):
        return answer
    race.reasons.append(f"{answer.upstream}: {'REFUSED' if rcode == message.REFUSED else 'SERVFAIL'}")
    if rcode == message.REFUSED:
        race.refused = race.refused or answer.wire
    else:
        race.is_only_refused = False
        race.servfail = race.servfail or answer.wire
    return None


def _failure(query: bytes, reason: str) -> Answer:
    wire = message.refusal(query, message.SERVFAIL, message.EDE_NO_REACHABLE, reason)
    return Answer(wire, failure=reason)

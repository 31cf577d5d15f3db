"""One UDP port mapped at the home router, so that peers can reach us behind a NAT that nothing else opens.

tailscale: net/portmapper. Sans-IO. Differences: PCP before NAT-PMP, because its answers carry our nonce; the pause
after a look that found nothing grows, so that a network without such a router is not asked every few seconds. IPv4
only; the gateway and we must have private addresses. A mapping is renewed at half of its life and forgotten when the
router says that it started anew.
"""

from __future__ import annotations

from ipaddress import IPv4Address
from itertools import count
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from tsd.base.addr import AddrPort
from tsd.base.entropy import Entropy
from tsd.base.log import DropCounter
from tsd.base.machine import Deadline
from tsd.portmap import dialog, igd, pxp
from tsd.portmap.dialog import Answer, Ask, Dialog, Mapped
from tsd.portmap.igd import Service

PROBE_S: Final = 1.0
SETTLE_S: Final = 0.05
"""After the first answer of PCP or NAT-PMP: both come at once, while UPnP is asked only when neither is there."""
EXCHANGE_S: Final = 1.0
ROUND_S: Final = 5.0
PAUSE_MIN_S, PAUSE_MAX_S = 30.0, 600.0
LIFETIME_MIN_S: Final = 120
EPOCH_SLACK_S: Final = 2
LOCATIONS: Final = 8
_NOWHERE = IPv4Address(0)


class SendDatagram(Struct, frozen=True):
    """From one socket of any port on the underlay; answers go to `receive`."""

    to: AddrPort
    datagram: bytes


class HttpWanted(Struct, frozen=True):
    """Ask, then call `answered` with the number; number 0: the answer does not matter."""

    number: int
    ask: Ask


class MappingChanged(Struct, frozen=True):
    """`external` None: there is none any more."""

    external: AddrPort | None
    protocol: str


Output = SendDatagram | HttpWanted | MappingChanged


class Mapping(Struct, frozen=True):
    """`protocol` is "pcp", "pmp" or "upnp"; `service` belongs to the latter, `nonce` to the first."""

    protocol: str
    gateway: IPv4Address
    internal: AddrPort
    external: AddrPort
    renew_at: float
    good_until: float
    nonce: bytes = b""
    service: Service | None = None


class Seen(Struct, frozen=True):
    """What the last look found; None: not looked yet."""

    upnp: bool | None = None
    pmp: bool | None = None
    pcp: bool | None = None


class PortMapper:
    """Asked by `want` now and then; tells by `MappingChanged`."""

    def __init__(self, *, entropy: Entropy, upnp: bool = True) -> None:
        self.drops = DropCounter()
        self.mapping: Mapping | None = None
        self.seen = Seen()
        self._entropy = entropy
        self._use_upnp = upnp
        self._gateway: IPv4Address | None = None
        self._own: IPv4Address | None = None
        self._port = 0
        self._nonce = entropy(pxp.NONCE_BYTES)
        self._outputs: list[Output] = []
        self._numbers = count(1)
        self._pause_s = PAUSE_MIN_S
        self._not_before = -1e9
        self._epochs: dict[str, int] = {}
        self._forget_round()

    # --- what it is about

    def set_network(self, gateway: IPv4Address | None, own: IPv4Address | None, port: int, now: float) -> None:
        """The gateway of the default route, our address towards it, our UDP port. A change releases the mapping."""
        is_home = gateway is not None and own is not None and gateway.is_private and own.is_private
        if not is_home:
            gateway = own = None
        if (gateway, own, port) == (self._gateway, self._own, self._port):
            return
        self.release()
        self._gateway, self._own, self._port = gateway, own, port
        self.seen, self._epochs = Seen(), {}
        self._pause_s, self._not_before = PAUSE_MIN_S, -1e9
        self._forget_round()

    def release(self) -> None:
        """Give the mapping back, as far as the router still hears us."""
        mapping, self.mapping = self.mapping, None
        if mapping is None:
            return
        to = AddrPort(mapping.gateway, pxp.PORT)
        port, external = mapping.internal.port, mapping.external
        if mapping.service is not None:
            self._outputs.append(HttpWanted(0, dialog.delete(mapping.service, external.port)))
        elif mapping.nonce:
            own, outside = _v4(mapping.internal), _v4(external)
            self._outputs.append(
                SendDatagram(to, pxp.pcp_map_request(own, mapping.nonce, port, external.port, outside, 0))
            )
        else:
            self._outputs.append(SendDatagram(to, pxp.pmp_map_request(port, 0, 0)))
        self._outputs.append(MappingChanged(None, mapping.protocol))

    def want(self, now: float) -> None:
        """A mapping is wanted now: look for one, unless there is one or it was looked for a moment ago."""
        if self._stage or self._gateway is None or not self._port or now < self._not_before:
            return
        if self.mapping is None or now >= self.mapping.renew_at:
            self._begin(now)

    # --- a round: look, then ask what answered, best protocol first

    def _forget_round(self) -> None:
        self._stage = ""
        self._stage_until = self._round_until = 0.0
        self._heard: set[str] = set()
        self._todo: list[str] = []
        self._locations: list[str] = []
        self._outside: IPv4Address | None = None
        self._dialog: Dialog | None = None
        self._asked = 0

    def _begin(self, now: float) -> None:
        self._forget_round()
        assert self._gateway is not None and self._own is not None
        self._stage, self._stage_until, self._round_until = "probe", now + PROBE_S, now + ROUND_S
        self._send(pxp.PMP_ADDRESS_REQUEST)
        self._send(pxp.pcp_announce_request(self._own))
        if self._use_upnp:
            self._outputs.extend(SendDatagram(to, text) for to, text in igd.searches(self._gateway))

    def _send(self, datagram: bytes) -> None:
        assert self._gateway is not None
        self._outputs.append(SendDatagram(AddrPort(self._gateway, pxp.PORT), datagram))

    def _end_probe(self, now: float) -> None:
        self.seen = Seen(upnp="upnp" in self._heard, pmp="pmp" in self._heard, pcp="pcp" in self._heard)
        self._todo = [name for name in ("pcp", "pmp", "upnp") if name in self._heard]
        self._try_next(now)

    def _try_next(self, now: float) -> None:
        if not self._todo or now >= self._round_until:
            self._failed(now)
            return
        self._stage = self._todo.pop(0)
        self._stage_until = now + EXCHANGE_S
        wish = self.mapping.external if self.mapping is not None else AddrPort(_NOWHERE, 0)
        assert self._own is not None and self._gateway is not None
        if self._stage == "pcp":
            self._send(pxp.pcp_map_request(self._own, self._nonce, self._port, wish.port, _v4(wish), pxp.LIFETIME_S))
        elif self._stage == "pmp":
            self._send(pxp.pmp_map_request(self._port, wish.port, pxp.LIFETIME_S))
        else:
            self._stage_until = self._round_until
            internal = AddrPort(self._own, self._port)
            self._dialog = dialog.map_port(
                self._locations, self._gateway, internal, wish.port or self._any_port(), pxp.LIFETIME_S
            )
            self._advance(None, now)

    def _any_port(self) -> int:
        span = 65536 - dialog.FIRST_PORT
        return dialog.FIRST_PORT + int.from_bytes(self._entropy(4)) % span

    def _failed(self, now: float) -> None:
        """An older mapping stays until its end."""
        self._forget_round()
        self._not_before = now + self._pause_s
        self._pause_s = min(self._pause_s * 2, PAUSE_MAX_S)
        self._expire(now)

    def _succeeded(self, external: AddrPort, lifetime_s: int, now: float, service: Service | None = None) -> None:
        protocol, gateway, own = self._stage, self._gateway, self._own
        assert gateway is not None and own is not None
        lifetime_s = max(lifetime_s, LIFETIME_MIN_S)
        before, self.mapping = self.mapping, Mapping(
            protocol, gateway, AddrPort(own, self._port), external, now + lifetime_s / 2, now + lifetime_s,
            self._nonce if protocol == "pcp" else b"", service,
        )  # fmt: skip
        self._forget_round()
        self._pause_s, self._not_before = PAUSE_MIN_S, -1e9
        if before is None or before.external != external:
            self._outputs.append(MappingChanged(external, protocol))

    # --- what comes back

    def receive(self, datagram: bytes, source: AddrPort, now: float) -> None:
        """A datagram that came to the socket of `SendDatagram`."""
        if self._gateway is None:
            self.drops.add("no gateway")
            return
        if datagram.startswith(b"HTTP/"):
            self._on_discovery(datagram, now)
            return
        if source != AddrPort(self._gateway, pxp.PORT):
            self.drops.add("not the gateway")
            return
        answer = pxp.decode(datagram)
        match answer:
            case None:
                self.drops.add("malformed")
            case pxp.PmpAddress() | pxp.PmpMapping():
                self._note_epoch("pmp", answer.epoch_s)
                self._on_pmp(answer, now)
            case pxp.PcpAnnounce() | pxp.PcpMapping():
                self._note_epoch("pcp", answer.epoch_s)
                self._on_pcp(answer, now)

    def _on_discovery(self, datagram: bytes, now: float) -> None:
        """From any address and port: some gateways answer from a second one, and only the gateway is asked then."""
        assert self._gateway is not None
        location = igd.parse_discovery(datagram, self._gateway)
        if location is None:
            self.drops.add("not a gateway device")
            return
        self._heard.add("upnp")
        if location not in self._locations and len(self._locations) < LOCATIONS:
            self._locations.append(location)
        if self._stage != "probe":
            self.seen = replace(self.seen, upnp=True)
            if self._stage in ("pcp", "pmp") and "upnp" not in self._todo:
                self._todo.append("upnp")

    def _on_pmp(self, answer: pxp.PmpAddress | pxp.PmpMapping, now: float) -> None:
        if isinstance(answer, pxp.PmpAddress):
            if answer.result == pxp.OK and answer.address is not None and self._stage == "probe":
                self._outside = answer.address
                self._hear("pmp", now)
        elif self._stage != "pmp" or answer.internal_port != self._port:
            self.drops.add("not asked for")
        elif answer.result != pxp.OK or not answer.external_port or not answer.lifetime_s or self._outside is None:
            self._try_next(now)
        else:
            self._succeeded(AddrPort(self._outside, answer.external_port), answer.lifetime_s, now)

    def _on_pcp(self, answer: pxp.PcpAnnounce | pxp.PcpMapping, now: float) -> None:
        if isinstance(answer, pxp.PcpAnnounce):
            if self._stage == "probe" and answer.result == pxp.OK:
                self._hear("pcp", now)
            elif self._stage == "pcp" and answer.result != pxp.OK:
                self._try_next(now)
        elif not self._stage or answer.nonce != self._nonce or answer.internal_port != self._port:
            self.drops.add("not asked for")
        elif answer.result == pxp.OK and answer.external_port and answer.lifetime_s and answer.external_ip is not None:
            # Also a late one: routers answer one request after the other.
            self._stage = "pcp"
            self._succeeded(AddrPort(answer.external_ip, answer.external_port), answer.lifetime_s, now)
        elif self._stage == "pcp":
            self._try_next(now)

    def _hear(self, protocol: str, now: float) -> None:
        self._heard.add(protocol)
        self._stage_until = min(self._stage_until, now + SETTLE_S)

    def _note_epoch(self, protocol: str, epoch_s: int) -> None:
        """A router whose clock went back has started anew and lost our mapping (RFC 6886, 3.6)."""
        before, self._epochs[protocol] = self._epochs.get(protocol, 0), epoch_s
        if epoch_s + EPOCH_SLACK_S < before and self.mapping is not None and self.mapping.protocol == protocol:
            self.mapping = None
            self._not_before = -1e9
            self._outputs.append(MappingChanged(None, protocol))

    def answered(self, number: int, answer: Answer, now: float) -> None:
        """To `HttpWanted`."""
        if self._dialog is None or number != self._asked:
            self.drops.add("late")
            return
        self._advance(answer, now)

    def _advance(self, answer: Answer | None, now: float) -> None:
        assert self._dialog is not None
        try:
            ask = self._dialog.send(answer) if answer is not None else next(self._dialog)
        except StopIteration as stop:
            found: Mapped | None = stop.value
            self._dialog = None
            if found is None:
                self._try_next(now)
            else:
                self._succeeded(found.external, found.lifetime_s or pxp.LIFETIME_S, now, found.service)
            return
        self._asked = next(self._numbers)
        self._outputs.append(HttpWanted(self._asked, ask))

    # --- time

    def next_deadline(self) -> Deadline | None:
        if self._stage:
            return Deadline(self._stage_until, f"port mapping: {self._stage}")
        if self.mapping is None:
            return None
        renewal = max(self.mapping.renew_at, self._not_before)
        return Deadline(min(renewal, self.mapping.good_until), "port mapping: renew")

    def on_deadline(self, now: float) -> None:
        if self._stage:
            if now >= self._stage_until:
                (self._end_probe if self._stage == "probe" else self._try_next)(now)
            return
        self._expire(now)
        if self.mapping is not None:
            self.want(now)

    def _expire(self, now: float) -> None:
        if self.mapping is not None and now >= self.mapping.good_until:
            protocol, self.mapping = self.mapping.protocol, None
            self._outputs.append(MappingChanged(None, protocol))

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs


def _v4(address: AddrPort) -> IPv4Address:
    assert isinstance(address.ip, IPv4Address)
    return address.ip

"""`tsctl ping`: disco, TSMP, ICMP and peerapi pings, and what the answer says about the path."""

from __future__ import annotations

import time

from tsctl import context as ctx
from tsctl.addresses import resolve
from tsctl.goflags import DURATION, Command, Failure, Flag, Parsed, UsageError
from tsctl.status import last_seen
from tsd.localapi.schema import format_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INTERVAL_S = 1.0
_FLAGS = (
    Flag("verbose", "say more", False),
    Flag("until-direct", "stop once the path is direct", True),
    Flag("tsmp", "ping inside the tunnel, without the host's IP stack", False),
    Flag("icmp", "ping with ICMP, answered by the host", False),
    Flag("peerapi", "try the peer's PeerAPI server", False),
    Flag("c", "stop after this many pings; 0 for no limit", 10),
    Flag("timeout", "how long to wait for an answer", 5.0, kind=DURATION),
    Flag("size", "bytes of the ping packet (disco only); 0 for the smallest", 0),
)


def ping_command(context: ctx.Context) -> Command:
    def run(parsed: Parsed) -> None:
        if parsed.seconds("timeout") <= 0:
            raise UsageError("--timeout must be longer than 0s")
        if parsed.number("c") < 0:
            raise UsageError("-c must not be negative")
        ctx.require_running(context.client.status())
        if len(parsed.args) != 1:
            raise UsageError("usage: tsctl ping <hostname-or-IP>")
        address, peer = resolve(context, parsed.args[0])
        if parsed.flag("verbose") and address != parsed.args[0]:
            ctx.out(f"lookup {ctx.quoted(parsed.args[0])} => {ctx.quoted(address)}")
        _Pinger(context, parsed, address, peer).run()

    details = (
        "Asks a peer by name, by tailnet address or by an address in a subnet that it advertises.\n"
        "Each line tells the path that the answer took: a UDP address is a direct path, DERP(xyz) a relay.\n"
        "Stops after -c pings, or when the path has become direct."
    )
    return Command("ping", "Ping a peer", run, flags=_FLAGS, usage="<hostname-or-IP>", details=details, max_args=-1)


class _Pinger:
    def __init__(self, context: ctx.Context, parsed: Parsed, address: str, peer: dict[str, Any] | None) -> None:
        self.context = context
        self.parsed = parsed
        self.address = address
        self.peer = peer
        self.kind = next(
            (word for flag, word in (("tsmp", "TSMP"), ("icmp", "ICMP"), ("peerapi", "peerapi")) if parsed.flag(flag)),
            "disco",
        )

    def run(self) -> None:
        sent, answered = 0, 0
        while True:
            sent += 1
            result = self._one()
            if result is not None:
                answered += 1
                if self._show(result):
                    return
            if sent == self.parsed.number("c"):
                break
            time.sleep(INTERVAL_S)
        if not answered:
            raise Failure(f"no reply{self._offline_note()}")
        if self.parsed.flag("until-direct"):
            raise Failure("direct connection not established")

    def _one(self) -> dict[str, Any] | None:
        name = f"ping?ip={self.address}&size={self.parsed.number('size')}&type={self.kind}"
        try:
            reply = self.context.client.call("POST", name, b"", timeout_s=self.parsed.seconds("timeout"))
        except TimeoutError:
            ctx.out(f"ping {ctx.quoted(self.address)} timed out")
            return None
        found = reply.json()
        return found if isinstance(found, dict) else {}

    def _show(self, result: dict[str, Any]) -> bool:
        """Print one answer; True when there is nothing more to ask."""
        error = str(result.get("Err") or "")
        if error:
            if result.get("IsLocalIP"):
                ctx.out(error)
                return True
            raise Failure(error)
        latency = _rounded(float(result.get("LatencySeconds") or 0))
        name, address = result.get("NodeName", ""), result.get("NodeIP", "")
        if self.kind == "peerapi":
            ctx.out(f"hit peerapi of {address} ({name}) at {result.get('PeerAPIURL', '')} in {latency}")
            return True
        port = f", {result['PeerAPIPort']}" if result.get("PeerAPIPort") else ""
        ctx.out(f"pong from {name} ({address}{port}) via {_via(result, self.kind)} in {latency}")
        if self.kind != "disco":
            return True
        return bool(result.get("Endpoint")) and self.parsed.flag("until-direct")

    def _offline_note(self) -> str:
        status = self.context.client.status()
        for peer in ctx.peers_of(status):
            if self.address in (peer.get("TailscaleIPs") or []) and not peer.get("Online"):
                return f" ({ctx.quoted(self.parsed.args[0])} is offline{last_seen(peer)})"
        return ""


def _rounded(latency_s: float) -> str:
    return format_duration(int(latency_s * 1000 + 0.5) / 1000)


def _via(result: dict[str, Any], kind: str) -> str:
    if result.get("PeerRelay"):
        return f"peer-relay({result['PeerRelay']})"
    if result.get("Endpoint"):
        return str(result["Endpoint"])
    if result.get("DERPRegionID"):
        return f"DERP({result.get('DERPRegionCode') or result['DERPRegionID']})"
    return kind


COMMANDS = {"ping": ping_command}

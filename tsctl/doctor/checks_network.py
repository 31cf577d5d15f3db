"""Verdicts about the way out: control server, clock, relays, UDP, NAT, full-sized packets. Each names the layer."""

from __future__ import annotations

from collections.abc import Iterator

from tsctl.doctor.facts import ControlFacts, Facts, Reached
from tsctl.doctor.verdict import FAULT, NOTE, Check, Finding, Skipped
from tsd.localapi.schema import RUNNING

CLOCK_FAULT_S, CLOCK_NOTE_S = 300.0, 30.0

_FIXES = {
    "dns": "make this host resolve it (resolv.conf, VPN, captive portal); getent hosts NAME shows what it says",
    "proxy": "check HTTPS_PROXY and NO_PROXY of the daemon's environment",
    "tcp": "let TCP to that port out of this network, or set HTTPS_PROXY for the daemon",
    "tls": "exempt it from TLS inspection, or install the inspecting CA on this host",
    "http": "check --login-server; a proxy in between must pass requests on unchanged",
}
_BY_REASON = {
    "Network is unreachable": "this machine has no way there: bring its network up (`ip -br address`, `ip route`)",
    "Invalid argument": "a blackhole route swallows it: see `ip route get ADDRESS` and `ip rule`",
    "No route to host": "nobody at that address answers: check the address, and that the machine there is up",
    "Connection refused": "see that the server runs and the port is right; a firewall that rejects looks the same: then"
    " let TCP to it out, or set HTTPS_PROXY for the daemon",
    "answers 'HTTP/1.1 5": "the server, or the proxy in front of it, is down for now: see its log; tsd keeps trying",
    "answers 'HTTP/1.0 5": "the server, or the proxy in front of it, is down for now: see its log; tsd keeps trying",
}
_NO_WAY = "Network is unreachable"
_LAYERS = {"dns": "DNS", "proxy": "the proxy", "tcp": "TCP", "tls": "TLS", "http": "HTTP"}


def clock(facts: Facts) -> Iterator[Finding]:
    control = facts.control
    if control is None or (control.clock_offset_s is None and not control.certificate):
        raise Skipped("the control server's clock could not be read")
    offset_s = control.clock_offset_s or 0.0
    if abs(offset_s) < CLOCK_NOTE_S:
        return
    way = "behind" if offset_s < 0 else "ahead of"
    cause = f"this machine's clock is {_span(abs(offset_s))} {way} the control server's"
    fix = "timedatectl set-ntp true, or date -s; certificates and keys are judged by it"
    yield Finding("hull", cause, fix, FAULT if abs(offset_s) >= CLOCK_FAULT_S else NOTE)


def _span(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def control(facts: Facts) -> Iterator[Finding]:
    found = facts.control
    if found is None:
        raise Skipped("no control server is known")
    is_connected = facts.daemon.report.get("ControlConnected", (facts.daemon.status.get("Self") or {}).get("Online"))
    if not found.reached.is_ok:
        severity = NOTE if is_connected else FAULT
        also = "; the daemon itself is connected" if is_connected else ""
        yield _unreached(f"the control server {found.url}", found.reached, found, severity, also)
        return
    said = str(facts.daemon.report.get("ControlError") or "")
    if is_connected is False and (said or facts.daemon.state == RUNNING):
        if not said:
            yield Finding("control", f"the daemon is still connecting to {found.url}", "look again in a minute", NOTE)
            return
        cause = (
            f"{found.url} answers over HTTP, but the daemon's connection to it (the upgrade to ts2021) fails: {said}"
        )
        yield Finding(
            "control", cause, "let a proxy in between pass `Upgrade: tailscale-control-protocol`; see tsd's log"
        )


def _unreached(what: str, reached: Reached, found: ControlFacts | None, severity: str, also: str = "") -> Finding:
    stage = reached.stage
    via = f" through the proxy {found.proxy}" if found is not None and found.proxy else ""
    cause = f"{what} is not reached{via}: {_LAYERS.get(stage, stage)} fails: {reached.reason}{also}"
    fix = next((text for words, text in _BY_REASON.items() if words in reached.reason), _FIXES.get(stage, ""))
    if found is not None and found.certificate in ("not-yet-valid", "expired"):
        fix = "set the clock if it is wrong (see clock); else the server's admin must renew the certificate"
    return Finding("control" if stage == "http" else "network", cause, fix, severity)


def relays(facts: Facts) -> Iterator[Finding]:
    found = facts.relays
    if found is None or not found.reached:
        raise Skipped("no relay is known")
    bad = {code: reached for code, reached in found.reached.items() if not reached.is_ok}
    if not bad:
        return
    if len(bad) == len(found.reached) or found.home in bad:
        code = found.home if found.home in bad else next(iter(bad))
        which = f"the home relay {code}" if code == found.home else f"the relay {code}"
        if len(bad) == len(found.reached) > 1:
            which = f"none of {len(bad)} relays answers; {which}"
        yield _unreached(which, bad[code], None, FAULT)
        return
    for code, reached in bad.items():
        yield _unreached(f"the relay {code}", reached, None, NOTE)


def udp(facts: Facts) -> Iterator[Finding]:
    found = facts.relays
    if found is None or not found.stun_targets:
        raise Skipped("no STUN server is known")
    if found.reached and all(_NO_WAY in one.reason for one in found.reached.values()):
        raise Skipped("this machine has no network")
    if not found.stun_answers:
        cause = f"UDP is blocked: none of {found.stun_targets} STUN servers answered, so all traffic takes a relay"
        yield Finding(
            "network", cause, "let UDP out (to 3478, and from this host's 41641 to anywhere), with its answers"
        )


def nat(facts: Facts) -> Iterator[Finding]:
    found = facts.relays
    if found is None or found.mapping_varies is None:
        raise Skipped("needs answers of two STUN servers")
    if found.mapping_varies:
        cause = "the NAT gives every destination another port (a hard NAT): direct paths depend on the other side"
        fix = "switch on UPnP, NAT-PMP or endpoint-independent mapping at the router, or forward UDP 41641"
        yield Finding("network", cause, fix, NOTE)


def paths(facts: Facts) -> Iterator[Finding]:
    told = str((facts.daemon.warnings.get("path-too-narrow") or {}).get("Text") or "")
    if told:
        cause, _, fix = told.partition(". Let ")
        yield Finding("network", f"{cause}: an MTU black hole", f"let {fix}")
        return
    if not facts.paths:
        raise Skipped("no peer has a direct path just now" if facts.daemon.answers else "no daemon answers")
    for path in facts.paths:
        if path.small_ok and not path.full_ok:
            cause = f"full-sized packets to {path.peer} ({path.endpoint}) vanish, small ones arrive: an MTU black hole"
            needed = facts.daemon.mtu_bytes + 80
            fix = f"let ICMP `fragmentation needed` through, raise the MTU on the way to {needed}, or lower tsd's --mtu"
            yield Finding("network", cause, fix)


CHECKS = (
    Check("clock", "the clock agrees with the control server's", clock, ("clock-wrong",)),
    Check(
        "control",
        "the control server answers",
        control,
        (
            "not-in-map-poll",
            "mapresponse-timeout",
            "using-cached-netmap",
            "no-control",
            "tls-connection-failed",
            "network-status",
        ),
    ),
    Check("relays", "relays answer over TLS", relays, ("no-derp-home", "no-derp-connection", "derp-timed-out")),
    Check("udp", "UDP gets out", udp),
    Check("nat", "the NAT allows direct paths", nat),
    Check("path-mtu", "full-sized packets arrive", paths, ("path-too-narrow",)),
)

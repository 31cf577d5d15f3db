"""`tsctl dns status` and `dns query`, with a reader for DNS replies small enough to need no library."""

from __future__ import annotations

import base64
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from urllib.parse import quote

from tsctl import context as ctx
from tsctl.client import ApiFailure
from tsctl.goflags import Command, Failure, Flag, Parsed, UsageError
from tsd.localapi.schema import DNS_QUERY_TYPES

_RCODES = (
    "Success",
    "FormatError",
    "ServerFailure",
    "NameError",
    "NotImplemented",
    "Refused",
)
_WAYS = {
    "direct": "direct (the file /etc/resolv.conf)",
    "none": "none (names are resolved by tsd's own proxies only)",
}
_TYPE_NAMES = {number: name for name, number in DNS_QUERY_TYPES.items()}
_JSON = (Flag("json", "print JSON", False),)


def dns_command(context: ctx.Context) -> Command:
    return Command(
        "dns",
        "See and ask the tailnet's DNS",
        None,
        subcommands=(
            Command(
                "status",
                "Show how names are resolved",
                lambda parsed: _status(context, parsed),
                flags=(*_JSON, Flag("all", "also say what is empty", False)),
            ),
            Command(
                "query",
                "Ask the node's own resolver",
                lambda parsed: _query(context, parsed),
                flags=_JSON,
                usage="<name> [type]",
                max_args=-1,
            ),
        ),
    )


def _resolver_texts(found: Any) -> list[str]:
    return [str(one.get("Addr")) for one in found or [] if isinstance(one, dict)]


def _status(context: ctx.Context, parsed: Parsed) -> None:
    status, prefs = context.client.status(), context.client.prefs()
    tailnet = status.get("CurrentTailnet")
    config: dict[str, Any] = {}
    system: dict[str, Any] | None = None
    system_error = ""
    if tailnet:
        config = context.client.get("dns-config") or {}
        try:
            system = context.client.get("dns-osconfig")
        except ApiFailure as failure:
            is_missing = "not supported" in failure.text
            system_error = "not supported on this platform" if is_missing else failure.text
    is_on = bool(prefs.get("CorpDNS"))
    if parsed.flag("json"):
        ctx.out(ctx.to_json(_status_json(status, config, system, system_error, is_on)))
    else:
        _print_status(status, config, system, system_error, is_on)


def _status_json(
    status: dict[str, Any], config: dict[str, Any], system: Any, system_error: str, is_on: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {"TailscaleDNS": is_on}
    tailnet = status.get("CurrentTailnet")
    if tailnet:
        found["CurrentTailnet"] = {
            "MagicDNSEnabled": bool(tailnet.get("MagicDNSEnabled")),
            "MagicDNSSuffix": tailnet.get("MagicDNSSuffix"),
            "SelfDNSName": (status.get("Self") or {}).get("DNSName"),
        }
    routes = {name.rstrip("."): value for name, value in (config.get("Routes") or {}).items() if value}
    for key, value in (
        ("Resolvers", config.get("Resolvers")),
        ("SplitDNSRoutes", routes if tailnet else None),
        ("FallbackResolvers", config.get("FallbackResolvers")),
        ("SearchDomains", config.get("Domains")),
        ("Nameservers", config.get("Nameservers")),
        ("CertDomains", config.get("CertDomains")),
        ("ExtraRecords", config.get("ExtraRecords")),
        ("ExitNodeFilteredSet", config.get("ExitNodeFilteredSet")),
        ("SystemDNS", system),
        ("SystemDNSError", system_error or None),
    ):
        if value is not None:
            found[key] = value
    return found


def _print_status(status: dict[str, Any], config: dict[str, Any], system: Any, system_error: str, is_on: bool) -> None:
    ctx.out("\n=== 'Use Tailscale DNS' status ===\n")
    ctx.out(f"Tailscale DNS: {'enabled' if is_on else 'disabled'}.")
    ctx.out(f"Change it with `tsctl set --accept-dns={'false' if is_on else 'true'}`.")
    ctx.out("\n=== MagicDNS configuration ===\n")
    tailnet = status.get("CurrentTailnet")
    if not tailnet:
        ctx.out("No tailnet information: the node is not connected.")
        return
    suffix, name = tailnet.get("MagicDNSSuffix") or "", str((status.get("Self") or {}).get("DNSName") or "")
    if tailnet.get("MagicDNSEnabled"):
        ctx.out(f"MagicDNS: enabled tailnet-wide (suffix = {suffix})")
        ctx.out(f"\nThis machine is reachable as {name.rstrip('.')}.")
    else:
        ctx.out("MagicDNS: disabled tailnet-wide.")
    _print_list("Resolvers (in order of preference):", _resolver_texts(config.get("Resolvers")), "the system's own")
    routes = [
        f"{domain.rstrip('.'):<30} -> {address}"
        for domain, resolvers in sorted((config.get("Routes") or {}).items())
        for address in _resolver_texts(resolvers)
    ]
    _print_list("Split DNS Routes:", routes, "none")
    _print_list("Search Domains:", [str(one) for one in config.get("Domains") or []], "none")
    ctx.out("\n=== System DNS configuration ===")
    if system_error:
        ctx.out(f"\n  (not known: {system_error})")
        return
    system = system or {}
    _print_list("Nameservers:", [str(one) for one in system.get("Nameservers") or []], "none")
    _print_list("Search domains:", [str(one) for one in system.get("SearchDomains") or []], "none")
    _print_list("Match domains:", [str(one) for one in system.get("MatchDomains") or []], "none")
    _print_manager(system.get("Manager"))


def _print_manager(manager: Any) -> None:
    """What this machine was told, and by whom; daemons of another make do not say it."""
    if not isinstance(manager, dict):
        return
    ctx.out("\n=== How names are set up on this machine ===\n")
    mode = str(manager.get("Mode") or "")
    ctx.out(f"Set up by: {_WAYS.get(mode, mode) or 'nobody (nothing to set up now)'}")
    _print_list("Because:", [str(one) for one in manager.get("Because") or []], "not looked at yet")
    if mode and mode != "none":
        for title, name in (
            ("Servers", "Nameservers"),
            ("Search domains", "SearchDomains"),
            ("Only for", "MatchDomains"),
        ):
            told = [str(one) for one in manager.get(name) or []]
            _print_list(
                f"{title} that were set:", _without_reverse(told), "all names" if title == "Only for" else "none"
            )
    if manager.get("Trouble"):
        ctx.out(f"\nTrouble: {manager['Trouble']}")


def _without_reverse(domains: list[str]) -> list[str]:
    """The reverse zones of the tailnet's addresses are many and always the same."""
    shown = [domain for domain in domains if not domain.endswith(".arpa")]
    hidden = len(domains) - len(shown)
    return [*shown, f"({hidden} reverse zones)"] if hidden else shown


def _print_list(title: str, lines: list[str], if_empty: str) -> None:
    ctx.out(f"\n{title}")
    for line in lines:
        ctx.out(f"  - {line}")
    if not lines:
        ctx.out(f"  ({if_empty})")


def _query(context: ctx.Context, parsed: Parsed) -> None:
    if not 1 <= len(parsed.args) <= 2:
        raise UsageError("usage: tsctl dns query <name> [type]")
    if len(parsed.args) > 1 and parsed.args[1].upper() not in DNS_QUERY_TYPES:
        known = ", ".join(DNS_QUERY_TYPES)
        raise UsageError(f"unknown type of DNS record {ctx.quoted(parsed.args[1])}; one of {known}")
    name, qtype = parsed.args[0], (parsed.args[1] if len(parsed.args) == 2 else "A").upper()
    found = context.client.get(f"dns-query?name={quote(name, safe='')}&type={quote(qtype, safe='')}")
    try:
        rcode, answers = read_reply(base64.b64decode(found.get("Bytes") or ""))
    except (ValueError, IndexError, AttributeError):
        raise Failure("the daemon's DNS reply does not parse") from None
    resolvers = found.get("Resolvers") or []
    who, failure = found.get("AnsweredBy") or {}, str(found.get("Failure") or "")
    code = "RCode" + (_RCODES[rcode] if rcode < len(_RCODES) else str(rcode))
    if parsed.flag("json"):
        value: dict[str, Any] = {"Name": name, "QueryType": qtype}
        if resolvers:
            value["Resolvers"] = resolvers
        if who:
            value["AnsweredBy"] = who
        if failure:
            value["Failure"] = failure
        ctx.out(ctx.to_json({**value, "ResponseCode": code, "Answers": answers}))
        return
    ctx.out(f"DNS query for {ctx.quoted(name)} ({qtype}) using the node's own resolver:\n")
    for address in _resolver_texts(resolvers):
        ctx.out(f"Forwarding to resolver: {address}")
    if who:
        ctx.out(f"Answered by: {who.get('Addr')} over {who.get('Transport')}")
    if failure:
        ctx.out(f"Not answered: {failure}")
    ctx.out(f"\nResponse code: {code}\n")
    if not answers:
        ctx.out("No answers.")
        return
    rows = [["Name", "TTL", "Class", "Type", "Body"], ["----", "---", "-----", "----", "----"]]
    rows += [[str(answer[key]) for key in ("Name", "TTL", "Class", "Type", "Body")] for answer in answers]
    for line in ctx.table(rows):
        ctx.out(line)


def read_reply(packet: bytes) -> tuple[int, list[dict[str, Any]]]:
    """(response code, answers). Raises ValueError or IndexError when it does not parse (RFC 1035)."""
    if len(packet) < 12:
        raise ValueError("short DNS message")
    questions, count = int.from_bytes(packet[4:6], "big"), int.from_bytes(packet[6:8], "big")
    position = 12
    for _ in range(questions):
        position = _read_name(packet, position)[1] + 4
    answers = []
    for _ in range(count):
        name, position = _read_name(packet, position)
        kind, dns_class, ttl_s, length = (
            int.from_bytes(packet[position + start : position + end], "big")
            for start, end in ((0, 2), (2, 4), (4, 8), (8, 10))
        )
        if position + 10 + length > len(packet):
            raise ValueError("record cut short")
        answers.append(
            {
                "Name": name,
                "TTL": ttl_s,
                "Class": "ClassINET" if dns_class == 1 else f"Class{dns_class}",
                "Type": f"Type{_TYPE_NAMES.get(kind, kind)}",
                "Body": _read_body(packet, kind, position + 10, length),
            }
        )
        position += 10 + length
    return packet[3] & 0x0F, answers


def _read_name(packet: bytes, position: int) -> tuple[str, int]:
    labels: list[str] = []
    end = -1
    for _ in range(128):
        length = packet[position]
        if length >= 0xC0:
            end = position + 2 if end < 0 else end
            position = (length & 0x3F) << 8 | packet[position + 1]
            continue
        position += 1
        if length == 0:
            return ".".join(labels) + ".", position if end < 0 else end
        labels.append(packet[position : position + length].decode("ascii", "backslashreplace"))
        position += length
    raise ValueError("name does not end")


def _read_body(packet: bytes, kind: int, start: int, length: int) -> str:
    body = packet[start : start + length]
    name = _TYPE_NAMES.get(kind, "")
    if name == "A" and length == 4:
        return str(IPv4Address(body))
    if name == "AAAA" and length == 16:
        return str(IPv6Address(body))
    if name in ("CNAME", "NS", "PTR"):
        return _read_name(packet, start)[0]
    if name == "MX":
        return f"{int.from_bytes(body[:2], 'big')} {_read_name(packet, start + 2)[0]}"
    if name == "SRV":
        fields = " ".join(str(int.from_bytes(body[i : i + 2], "big")) for i in (0, 2, 4))
        return f"{fields} {_read_name(packet, start + 6)[0]}"
    if name == "SOA":
        primary, position = _read_name(packet, start)
        mailbox, position = _read_name(packet, position)
        return " ".join(
            (
                primary,
                mailbox,
                *(str(int.from_bytes(packet[i : i + 4], "big")) for i in range(position, position + 20, 4)),
            )
        )
    if name == "TXT":
        texts, position = [], 0
        while position < length:
            texts.append(
                ctx.quoted(body[position + 1 : position + 1 + body[position]].decode("utf-8", "backslashreplace"))
            )
            position += 1 + body[position]
        return " ".join(texts)
    return body.hex()


COMMANDS = {"dns": dns_command}

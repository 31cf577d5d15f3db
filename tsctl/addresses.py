"""`tsctl ip`, `whois`, `whoami`, and the rule by which a word on the command line becomes a tailnet address."""

from __future__ import annotations

from tsctl import context as ctx
from tsctl.client import ApiFailure
from tsctl.goflags import Command, Failure, Flag, Parsed, UsageError
from tsctl.status import is_ip

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def find_peer(status: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The peer, or this node, that people mean by `name`: short name (any case) or FQDN with or without its dot."""
    suffix = status.get("MagicDNSSuffix") or (status.get("CurrentTailnet") or {}).get("MagicDNSSuffix") or ""
    wanted = name.lower().rstrip(".")
    own = status.get("Self")
    for peer in (*ctx.peers_of(status), *([own] if isinstance(own, dict) else [])):
        fqdn = str(peer.get("DNSName") or "").lower().rstrip(".")
        short = ctx.short_name(peer, suffix).lower() or str(peer.get("HostName") or "").lower()
        if wanted and wanted in (fqdn, short):
            return peer
    return None


def resolve(context: ctx.Context, word: str) -> tuple[str, dict[str, Any] | None]:
    """(address, peer if it is one). Raises Failure with one line."""
    if is_ip(word):
        return word, None
    peer = find_peer(context.client.status(), word)
    if peer is not None:
        addresses = peer.get("TailscaleIPs") or []
        if not addresses:
            raise Failure(f"{ctx.quoted(word)} has no tailnet address yet")
        return str(addresses[0]), peer
    return _ask_host_resolver(word), None


def _ask_host_resolver(word: str) -> str:
    import socket

    if word.replace(".", "").isdigit():
        raise UsageError(f"{ctx.quoted(word)} is neither an IP address nor the name of a machine")
    try:
        return str(socket.getaddrinfo(word, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Failure(
            f"error looking up IP of {ctx.quoted(word)}: no machine of the tailnet has this name, and: {reason}"
        ) from None


def ip_command(context: ctx.Context) -> Command:
    flags = (
        Flag("1", "only one address", False),
        Flag("4", "only IPv4", False),
        Flag("6", "only IPv6", False),
        Flag("assert", "succeed silently if the node has this address, else fail"),
    )

    def run(parsed: Parsed) -> None:
        if sum(parsed.flag(name) for name in ("1", "4", "6")) > 1:
            raise UsageError("tsctl ip: -1, -4 and -6 exclude each other")
        if len(parsed.args) > 1:
            raise UsageError("too many arguments, expected at most one peer")
        addresses = _addresses(context, parsed.args[0] if parsed.args else "")
        wanted = parsed.text("assert")
        if wanted:
            if wanted not in addresses:
                raise Failure(f"assertion failed: IP {ctx.quoted(wanted)} not found among {ctx.go_list(addresses)}")
            return
        for address in _filtered(addresses, parsed):
            ctx.out(address)

    return Command(
        "ip", "Show tailnet addresses of this node or of a peer", run, flags=flags, usage="[flags] [peer]", max_args=-1
    )


def _filtered(addresses: list[str], parsed: Parsed) -> list[str]:
    if parsed.flag("1"):
        return addresses[:1]
    for flag, mark in (("4", False), ("6", True)):
        if parsed.flag(flag):
            found = [one for one in addresses if (":" in one) == mark]
            if not found:
                raise Failure(f"no Tailscale IPv{flag} address")
            return found
    return addresses


def _addresses(context: ctx.Context, word: str) -> list[str]:
    status = context.client.status()
    if not word:
        own = ctx.own_addresses(status)
        if not own:
            raise Failure(f"no current Tailscale IPs; state: {status.get('BackendState')}")
        return own
    address = word if is_ip(word) else resolve(context, word)[0]
    own_status = status.get("Self")
    for peer in (*ctx.peers_of(status), *([own_status] if isinstance(own_status, dict) else [])):
        if address in (peer.get("TailscaleIPs") or []):
            return [str(one) for one in peer["TailscaleIPs"]]
    for service in _services(context):
        if address in (service.get("Addrs") or []):
            return [str(one) for one in service["Addrs"]]
    raise Failure(f"no peer or service found with IP {address}")


def _services(context: ctx.Context) -> list[dict[str, Any]]:
    try:
        found = context.client.get("services")
    except ApiFailure:
        return []
    return [one for one in found.values() if isinstance(one, dict)] if isinstance(found, dict) else []


def whois_command(context: ctx.Context) -> Command:
    flags = (Flag("json", "print JSON", False), Flag("proto", "tcp or udp; empty for either"))

    def run(parsed: Parsed) -> None:
        if not parsed.args:
            raise UsageError("usage: tsctl whois <ip[:port] or name>")
        if len(parsed.args) > 1:
            raise UsageError("too many arguments, expected one peer")
        found = _whois(context, _whois_address(context, parsed.args[0]), parsed.text("proto"))
        if parsed.flag("json"):
            ctx.out(ctx.to_json(found))
        else:
            _print_whois(found)

    usage = "[flags] <ip[:port] or name>"
    return Command("whois", "Show who is behind a tailnet address", run, flags=flags, usage=usage, max_args=-1)


def _whois_address(context: ctx.Context, word: str) -> str:
    """What the daemon takes: an IP, or ip:port; a name is looked up first."""
    host, colon, port = word.rpartition(":")
    if not word or (host and port.isdecimal() and not is_ip(word.strip("[]")) and int(port[:6]) > 65535):
        raise UsageError(f"{ctx.quoted(word)} is neither an IP address, ip:port nor the name of a machine")
    if is_ip(word.strip("[]")) or (is_ip(host.strip("[]")) and port.isdecimal()):
        return word
    if not (colon and host and port.isdecimal()):
        host, port = word, ""
    address = resolve(context, host)[0]
    if not port:
        return address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _whois(context: ctx.Context, addr: str, proto: str) -> dict[str, Any]:
    from urllib.parse import quote

    try:
        found = context.client.get(f"whois?proto={quote(proto, safe='')}&addr={quote(addr, safe='')}")
    except ApiFailure as failure:
        if failure.status == 404:
            raise Failure("peer not found") from None
        raise
    return found if isinstance(found, dict) else {}


def _print_whois(found: dict[str, Any]) -> None:
    node = found.get("Node") or {}
    addresses, allowed = node.get("Addresses") or [], node.get("AllowedIPs") or []
    rows = [
        ["  Name:", str(node.get("Name") or "").rstrip(".")],
        ["  ID:", str(node.get("StableID") or "")],
        ["  Addresses:", ctx.go_list(addresses)],
    ]
    if len(allowed) > 2:
        rows.append(["  AllowedIPs:", ctx.go_list(allowed[:2] + allowed[2:])])
    if node.get("Tags"):
        rows.append(["  Tags:", ", ".join(str(tag) for tag in node["Tags"])])
    ctx.out("Machine:")
    for line in ctx.table(rows, pad=5):
        ctx.out(line)
    if not node.get("Tags"):
        user = found.get("UserProfile") or {}
        ctx.out("User:")
        user_rows = [["  Name:", str(user.get("LoginName") or "")], ["  ID:", str(user.get("ID") or "")]]
        for line in ctx.table(user_rows, pad=5):
            ctx.out(line)
    if found.get("CapMap"):
        ctx.out("Capabilities:")
        for cap, values in sorted(found["CapMap"].items()):
            ctx.out(f"  - {cap}{': ' + ctx.to_json(values, None) if values else ''}")


def whoami_command(context: ctx.Context) -> Command:
    def run(parsed: Parsed) -> None:
        status = context.client.status(with_peers=False)
        own = ctx.own_addresses(status)
        if not own:
            raise Failure(f"no current Tailscale IP address; state: {status.get('BackendState')}")
        found = _whois(context, own[0], "")
        tailnet = status.get("CurrentTailnet") or {}
        if parsed.flag("json"):
            ctx.out(ctx.to_json({**found, "CurrentTailnet": tailnet or None}))
            return
        _print_whois(found)
        ctx.out("Tailnet:")
        rows = [
            ["  Name:", str(tailnet.get("Name") or "")],
            ["  MagicDNS Suffix:", str(tailnet.get("MagicDNSSuffix") or "")],
        ]
        for line in ctx.table(rows, pad=5):
            ctx.out(line)

    return Command(
        "whoami", "Show this machine, its user and its tailnet", run, flags=(Flag("json", "print JSON", False),)
    )


COMMANDS = {"ip": ip_command, "whois": whois_command, "whoami": whoami_command}

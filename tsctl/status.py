"""`tsctl status`: the node and its peers, as a table or as the daemon's JSON."""

from __future__ import annotations

import time

from tsctl import context as ctx
from tsctl.goflags import Command, Failure, Flag, Parsed, UsageError
from tsd.localapi.schema import RUNNING, STARTING, STATUS_PUMP, STOPPED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MULLVAD_SUFFIX = "mullvad.ts.net."
_FLAGS = (
    Flag("json", "print the status as JSON", False),
    Flag("active", "only peers with an active session", False),
    Flag("self", "include this machine", True),
    Flag("peers", "include the peers", True),
    Flag("header", "print column headings", False),
    Flag("web", "not available in tsctl", False, is_hidden=True),
    Flag("listen", "not available in tsctl", "127.0.0.1:8384", is_hidden=True),
    Flag("browser", "not available in tsctl", True, is_hidden=True),
)


def status_command(context: ctx.Context) -> Command:
    def run(parsed: Parsed) -> None:
        if parsed.args:
            raise UsageError("unexpected non-flag arguments to 'tsctl status' (see tsctl status --help)")
        if parsed.flag("web"):
            raise UsageError("tsctl has no web view; use --json, or a browser on your control server")
        status = context.client.status(parsed.flag("peers"))
        if parsed.flag("json"):
            _print_json(status, parsed)
        else:
            _print_text(context, status, parsed)

    return Command("status", "Show the node, its peers and its health", run, flags=_FLAGS, max_args=-1)


def _print_json(status: dict[str, Any], parsed: Parsed) -> None:
    peers = status.get("Peer")
    if parsed.flag("active") and isinstance(peers, dict):
        status["Peer"] = {key: peer for key, peer in peers.items() if isinstance(peer, dict) and peer.get("Active")}
    if not parsed.flag("self"):
        status["Self"] = None
    ctx.out(ctx.to_json(status))


def _print_text(context: ctx.Context, status: dict[str, Any], parsed: Parsed) -> None:
    reason = ctx.not_running_reason(status)
    if reason:
        ctx.out(reason)
        if status.get("BackendState") != STOPPED:
            _print_health(status, ("logged out", "is stopped"))
        raise Failure(code=1)
    rows, hides_some = _rows(status, parsed)
    for line in ctx.table(rows, pads_last=True):
        ctx.out(line)
    if hides_some:
        ctx.out("\n# Some exit nodes are not shown; `tsctl exit-node list` shows all of them.")
    _print_health(status)
    _print_pump(status)
    if status.get("BackendState") in (RUNNING, STARTING):
        _print_funnel(context)


def _rows(status: dict[str, Any], parsed: Parsed) -> tuple[list[list[str]], bool]:
    rows: list[list[str]] = []
    if parsed.flag("header"):
        heading = ["IP", "Hostname", "Owner", "OS", "Status"]
        rows += [heading, ["-" * len(word) for word in heading]]
    own = status.get("Self")
    if parsed.flag("self") and isinstance(own, dict):
        rows.append(_row(own, status))
    hides_some = False
    for peer in sorted(ctx.peers_of(status), key=_sort_key) if parsed.flag("peers") else []:
        if peer.get("ShareeNode") or (parsed.flag("active") and not peer.get("Active")):
            continue
        if _is_hidden_exit_node(peer):
            hides_some = True
            continue
        rows.append(_row(peer, status))
    return rows, hides_some


def _sort_key(peer: dict[str, Any]) -> tuple[str, str, str, str]:
    address = (peer.get("TailscaleIPs") or [""])[0]
    return (
        str(peer.get("DNSName") or "").lower(),
        str(peer.get("HostName") or "").lower(),
        str(address),
        str(peer.get("PublicKey") or ""),
    )


def _is_hidden_exit_node(peer: dict[str, Any]) -> bool:
    is_provider = str(peer.get("DNSName") or "").endswith(MULLVAD_SUFFIX)
    return is_provider and bool(peer.get("ExitNodeOption")) and not peer.get("ExitNode")


def _row(peer: dict[str, Any], status: dict[str, Any]) -> list[str]:
    address = (peer.get("TailscaleIPs") or ["-"])[0]
    return [str(address), _name(peer, status), _owner(peer, status), str(peer.get("OS") or "-"), _state(peer)]


def _name(peer: dict[str, Any], status: dict[str, Any]) -> str:
    suffix = (status.get("CurrentTailnet") or {}).get("MagicDNSSuffix") or status.get("MagicDNSSuffix") or ""
    name = ctx.short_name(peer, suffix)
    if not name:
        host = "".join(c if c.isalnum() or c in "-." else "-" for c in str(peer.get("HostName") or ""))
        return f'("{host.strip("-").lower()}")'
    if "xn--" in name:
        try:
            return f"{name} ({name.encode('ascii').decode('idna')})"
        except UnicodeError:
            return name
    return name


def _owner(peer: dict[str, Any], status: dict[str, Any]) -> str:
    user_id = peer.get("AltSharerUserID") or peer.get("UserID")
    user = (status.get("User") or {}).get(str(user_id)) or {}
    login = str(user.get("LoginName") or "")
    if not login:
        return "-"
    before, at, _ = login.partition("@")
    return before + at


def _state(peer: dict[str, Any]) -> str:
    text = _active_text(peer) if peer.get("Active") else _inactive_text(peer)
    received, sent = peer.get("RxBytes") or 0, peer.get("TxBytes") or 0
    return f"{text}, tx {sent} rx {received}" if received or sent else text


def _exit_word(peer: dict[str, Any]) -> str:
    if peer.get("ExitNode"):
        return "exit node"
    return "offers exit node" if peer.get("ExitNodeOption") else ""


def _inactive_text(peer: dict[str, Any]) -> str:
    has_traffic = bool(peer.get("RxBytes") or peer.get("TxBytes"))
    exit_word = _exit_word(peer)
    if exit_word:
        return f"idle; {exit_word}{_offline_suffix(peer)}"
    if has_traffic:
        return f"idle{_offline_suffix(peer)}"
    if not peer.get("Online"):
        return f"offline{last_seen(peer)}"
    return "-"


def _active_text(peer: dict[str, Any]) -> str:
    exit_word = _exit_word(peer)
    parts = ["active", *([exit_word] if exit_word else [])]
    if peer.get("PeerRelay"):
        parts.append(f"peer-relay {peer['PeerRelay']}")
    elif peer.get("CurAddr"):
        parts.append(f"direct {peer['CurAddr']}")
    elif peer.get("Relay"):
        parts.append(f'relay "{peer["Relay"]}"')
    return "; ".join(parts) + _offline_suffix(peer)


def _offline_suffix(peer: dict[str, Any]) -> str:
    return "" if peer.get("Online") else f"; offline{last_seen(peer)}"


def last_seen(peer: dict[str, Any]) -> str:
    """`, last seen 5m ago`, or nothing when the time is not known (the zero time is not a time)."""
    seen_s = unix_time(str(peer.get("LastSeen") or ""))
    if seen_s is None:
        return ""
    minutes = max(1, int((time.time() - seen_s) // 60))
    if minutes < 60:
        return f", last seen {minutes}m ago"
    return f", last seen {minutes // 60}h ago" if minutes < 48 * 60 else f", last seen {minutes // 1440}d ago"


def unix_time(stamp: str) -> float | None:
    """Seconds of an RFC 3339 time in UTC; None for the zero time and for anything else."""
    if not stamp or stamp.startswith("0001-01-01") or stamp[10:11] != "T":
        return None
    try:
        year, month, day = (int(part) for part in stamp[:10].split("-"))
        hour, minute, second = (int(part) for part in stamp[11:19].split(":"))
    except ValueError:
        return None
    return (_days(year, month, day) * 24 + hour) * 3600.0 + minute * 60 + second


def _days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 in the Gregorian calendar, years counted from March so that the leap day comes last."""
    year, month = (year, month - 3) if month > 2 else (year - 1, month + 9)
    return year * 365 + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + day - 719469


def _print_health(status: dict[str, Any], said_already: tuple[str, ...] = ()) -> None:
    texts = [str(text) for text in status.get("Health") or [] if text]
    health = [text for text in texts if not any(words in text.lower() for words in said_already)]
    if health:
        ctx.out("\n# Health check:")
        for text in health:
            ctx.out("#     - " + text.replace("\n", "\n#       "))


def _print_pump(status: dict[str, Any]) -> None:
    """Only tsd says which pump moves its packets."""
    if status.get(STATUS_PUMP):
        ctx.out(f"\n# Packet pump: {status[STATUS_PUMP]}")


def _print_funnel(context: ctx.Context) -> None:
    try:
        config = context.client.get("serve-config")
    except Failure as failure:
        ctx.out(f"\n# Funnel:\n#     - Funnel status is not known: {failure.text}")
        return
    public = [port for port, is_on in ((config or {}).get("AllowFunnel") or {}).items() if is_on]
    if public:
        ctx.out("\n# Funnel on:")
        for host_port in sorted(public):
            ctx.out(f"#     - https://{host_port.removesuffix(':443')}")
        ctx.out()


def is_ip(text: str) -> bool:
    import ipaddress

    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


COMMANDS = {"status": status_command}

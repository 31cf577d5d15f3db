"""Status and WhoIs as Go-shaped JSON (tailscale: ipn/ipnstate/ipnstate.go, ipn/ipnlocal/local.go).

Pure builders: they read values they are given, so that an answer is one consistent snapshot. A field that a peer
does not have (Hostinfo, name, addresses) never breaks the rest.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from tsd.base.addr import AddrPort
from tsd.engine.peers import Peer, node_addresses
from tsd.engine.report.goshape import clean_node, good_prefixes, good_time
from tsd.tailcfg.node import Node
from tsd.tailcfg.wire import ZERO_TIME, time_text, to_go

Json = dict[str, Any]

ACTIVE_S = 120.0
DEPRECATED_CAPS = "HTTPS://TAILSCALE.COM/s/DEPRECATED-NODE-CAPS#see-https://github.com/tailscale/tailscale/issues/11508"
CAP_FILE_SHARING = "https://tailscale.com/cap/file-sharing"


class PeerLive(Struct, frozen=True):
    """What the data path knows of a peer at this moment."""

    cur_addr: AddrPort | None = None
    relay_code: str = ""
    rx_bytes: int = 0
    tx_bytes: int = 0
    last_write_ns: int = 0
    last_handshake_ns: int = 0
    is_active: bool = False
    is_in_engine: bool = False
    is_exit_node: bool = False


def _time(ns: int) -> str:
    return time_text(ns) if ns else ZERO_TIME


def _addrs(node: Node) -> list[str]:
    return [str(ip) for ip in node_addresses(node)]


def _peerapi_urls(node: Node) -> list[str]:
    hostinfo = node.hostinfo
    if hostinfo is None:
        return []
    urls = []
    for ip in node_addresses(node):
        port = hostinfo.service_port(f"peerapi{ip.version}")
        if port:
            urls.append(f"http://{AddrPort(ip, port)}")
    return urls


def is_exit_node_option(node: Node) -> bool:
    allowed = node.allowed_ips or ()
    return "0.0.0.0/0" in allowed and "::/0" in allowed


def short_expiry(text: str | None) -> str | None:
    """Whole seconds, as upstream rounds it."""
    if not text or "." not in text:
        return text
    seconds, _, rest = text.partition(".")
    return seconds + rest.lstrip("0123456789")


def _optional(node: Node) -> Json:
    """Fields that are left out when empty."""
    out: Json = {}
    if node.sharer:
        out["AltSharerUserID"] = node.sharer
    if node.allowed_ips is not None or node.addresses:
        out["AllowedIPs"] = good_prefixes(node.routed_ips)
    if node.tags:
        out["Tags"] = list(node.tags)
    if node.primary_routes:
        out["PrimaryRoutes"] = good_prefixes(node.primary_routes)
    return out


def peer_status(peer: Peer, live: PeerLive, wall_ns: int, own_user: int = 0, can_share_files: bool = False) -> Json:
    """One entry of `Peer`."""
    node = peer.node
    hostinfo = node.hostinfo
    out = _common(node, hostinfo.hostname if hostinfo else node.base_name, hostinfo.os if hostinfo else "")
    out |= {
        "CurAddr": str(live.cur_addr) if live.cur_addr else "",
        "Relay": live.relay_code,
        "RxBytes": live.rx_bytes,
        "TxBytes": live.tx_bytes,
        "LastWrite": _time(live.last_write_ns),
        "LastSeen": good_time(node.last_seen) or ZERO_TIME,
        "LastHandshake": _time(live.last_handshake_ns),
        "Online": bool(node.online),
        "ExitNode": live.is_exit_node,
        "ExitNodeOption": is_exit_node_option(node),
        "Active": live.is_active,
        "TaildropTarget": _taildrop_target(node, own_user, can_share_files),
        "InMagicSock": True,
        "InEngine": live.is_in_engine,
    }
    if hostinfo is not None and hostinfo.ssh_host_keys:
        out["sshHostKeys"] = list(hostinfo.ssh_host_keys)
    if hostinfo is not None and hostinfo.sharee_node:
        out["ShareeNode"] = True
    if node.is_expired(wall_ns):
        out["Expired"] = True
    if hostinfo is not None and hostinfo.location is not None:
        out["Location"] = to_go(hostinfo.location)
    return out


def _common(node: Node, host_name: str, os_name: str) -> Json:
    """The fields in upstream's order, with their zero values; `_optional` ones in place."""
    out: Json = {
        "ID": node.stable_id,
        "NodeID": node.id,
        "PublicKey": node.key,
        "HostName": host_name,
        "DNSName": node.name,
        "OS": os_name,
        "UserID": node.user,
        "TailscaleIPs": _addrs(node),
        **_optional(node),
        "Addrs": None,
        "CurAddr": "",
        "Relay": "",
        "PeerRelay": "",
        "RxBytes": 0,
        "TxBytes": 0,
        "Created": good_time(node.created) or ZERO_TIME,
        "LastWrite": ZERO_TIME,
        "LastSeen": ZERO_TIME,
        "LastHandshake": ZERO_TIME,
        "Online": False,
        "ExitNode": False,
        "ExitNodeOption": False,
        "Active": False,
        "PeerAPIURL": _peerapi_urls(node),
        "TaildropTarget": 0,
        "NoFileSharingReason": "",
    }
    out |= _capabilities(node)
    out |= {"InNetworkMap": True, "InMagicSock": False, "InEngine": False}
    expiry = short_expiry(good_time(node.key_expiry))
    if expiry:
        out["KeyExpiry"] = expiry
    return out


def _capabilities(node: Node) -> Json:
    out: Json = {}
    if node.capabilities:
        out["Capabilities"] = list(node.capabilities)
    if node.cap_map:
        out["CapMap"] = {cap: None if values is None else list(values) for cap, values in sorted(node.cap_map.items())}
    return out


def _taildrop_target(node: Node, own_user: int, can_share_files: bool) -> int:
    """Codes of ipnstate.TaildropTargetStatus."""
    if not can_share_files:
        return 4
    if node.online is False:
        return 5
    hostinfo = node.hostinfo
    if hostinfo is None:
        return 6
    if not _peerapi_urls(node):
        return 8
    return 1 if node.user == own_user else 9


def self_status(
    node: Node | None,
    *,
    public_key: str,
    host_name: str,
    os_name: str,
    endpoints: list[str],
    relay_code: str,
    peerapi_urls: list[str],
    is_online: bool,
    known_addresses: list[str],
) -> Json:
    """`Self`: never null, also before the first netmap; `known_addresses` are from an earlier one."""
    if node is None:
        blank = _common(Node(key=public_key), host_name, os_name)
        blank.pop("AllowedIPs", None)
        unknown = {"Addrs": None, "PeerAPIURL": None, "InNetworkMap": False}
        return blank | {"TailscaleIPs": known_addresses or None} | unknown
    out = _common(node, host_name, os_name)
    out |= {
        "Addrs": endpoints,
        "Relay": relay_code,
        "Online": is_online,
        "ExitNodeOption": is_exit_node_option(node),
        "PeerAPIURL": peerapi_urls or out["PeerAPIURL"],
    }
    out["Capabilities"] = [DEPRECATED_CAPS, *sorted(set(node.cap_map or {}) | set(node.capabilities or ()))]
    return out


def go_node(node: Node, magic_suffix: str = "") -> Json:
    """A node as WhoIs and the bus show it, with the names that clients compute."""
    hostinfo = node.hostinfo
    out: Json = clean_node(to_go(node), hostinfo is not None)
    name = node.name.rstrip(".")
    computed = name.removesuffix("." + magic_suffix) if magic_suffix else name
    raw_host = hostinfo.hostname if hostinfo else ""
    out["ComputedName"] = computed
    with_host = computed
    if raw_host and raw_host.lower() != computed.lower():
        with_host = f"{computed} ({raw_host})"
    out["ComputedNameWithHost"] = with_host
    return out

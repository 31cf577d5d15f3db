"""A node record as the wire shows it: to itself, to a peer, as a patch; and the small fixed parts of a map."""

from __future__ import annotations

from typing import Any

import msgspec

from tsd.base.addr import IPPrefix
from tsd.coord.state.config import CoordConfig
from tsd.coord.state.records import TAGGED_LOGIN, TAGGED_USER_ID, NodeRecord, User, valid_prefixes
from tsd.tailcfg.dns import DNSConfig
from tsd.tailcfg.hostinfo import Hostinfo
from tsd.tailcfg.node import Node, PeerChange, hostinfo_field
from tsd.tailcfg.user import UserProfile
from tsd.tailcfg.wire import time_text

_INT32 = 1 << 31
_MAX_TEXT, _MAX_KEY_TEXT, _MAX_ITEMS, _MAX_ROUTES = 255, 4096, 100, 1000

SELF_CAPABILITIES: dict[str, tuple[Any, ...] | None] = {
    "https://tailscale.com/cap/is-admin": None,
    "https://tailscale.com/cap/ssh": None,
    "https://tailscale.com/cap/file-sharing": None,
    "default-auto-update": (False,),
}


def full_name(label: str, config: CoordConfig) -> str:
    """FQDN with the trailing dot that the wire wants."""
    return f"{label}.{config.base_domain}."


def self_node(node: NodeRecord, config: CoordConfig, routes: tuple[IPPrefix, ...], extra: dict[str, list[Any]]) -> Node:
    """As the node itself gets it: with all of its Hostinfo and its capabilities, without its paths."""
    caps: dict[str, tuple[Any, ...] | None] = dict(SELF_CAPABILITIES)
    caps.update({name: tuple(values) or None for name, values in extra.items()})
    return msgspec.structs.replace(
        _common(node, config, routes), hostinfo_raw=hostinfo_field(node.hostinfo), cap_map=caps, cap=node.cap
    )


def peer_node(
    node: NodeRecord, config: CoordConfig, routes: tuple[IPPrefix, ...], is_online: bool, is_expired: bool
) -> Node:
    """As any peer that may use `routes` gets it."""
    return msgspec.structs.replace(
        _common(node, config, routes),
        hostinfo_raw=hostinfo_field(public_hostinfo(node.hostinfo)),
        endpoints=node.endpoints or None,
        home_derp=node.home_derp,
        legacy_derp=f"127.3.3.40:{node.home_derp}" if node.home_derp else "",
        disco_key=node.disco_key or None,
        cap=node.cap,
        online=is_online,
        last_seen=last_seen(node, is_online),
        expired=is_expired,
    )


def _common(node: NodeRecord, config: CoordConfig, routes: tuple[IPPrefix, ...]) -> Node:
    own = tuple(f"{address}/{address.max_prefixlen}" for address in node.ips)
    carried = tuple(str(route) for route in routes)
    return Node(
        id=node.id,
        stable_id=stable_id(node.id),
        name=full_name(node.label, config),
        user=node.owner_id,
        key=node.node_key,
        key_expiry=None if node.expiry_ns is None else time_text(node.expiry_ns),
        machine=node.machine_key,
        addresses=own,
        allowed_ips=own + carried,
        primary_routes=tuple(text for text, route in zip(carried, routes, strict=True) if route.prefixlen) or None,
        created=time_text(node.created_ns),
        tags=node.tags or None,
        machine_authorized=True,
    )


def stable_id(node_id: int) -> str:
    return f"n{node_id}CNTRL"


def last_seen(node: NodeRecord, is_online: bool) -> str | None:
    return None if is_online or node.last_seen_ns is None else time_text(node.last_seen_ns)


def patch(node: NodeRecord, is_online: bool) -> PeerChange:
    """The changeable facts of a path in full; fit for a peer that has the node already."""
    return PeerChange(
        node_id=node.id,
        derp_region=node.home_derp,
        cap=node.cap,
        endpoints=node.endpoints or None,
        disco_key=node.disco_key or None,
        online=is_online,
        last_seen=last_seen(node, is_online),
    )


def public_hostinfo(hostinfo: Hostinfo) -> Hostinfo:
    """What peers may know about a host: how to talk to its services, not what it is made of.

    Values that a strict decoder refuses are left out, and long ones are cut: one odd node must not cost its peers
    their whole map, nor fill it.
    """
    location = hostinfo.location
    if location is not None and abs(location.priority) > _INT32:
        location = None
    return Hostinfo(
        os=hostinfo.os[:_MAX_TEXT],
        hostname=hostinfo.hostname[:_MAX_TEXT],
        shields_up=hostinfo.shields_up,
        routable_ips=valid_prefixes(hostinfo.routable_ips)[:_MAX_ROUTES] or None,
        services=tuple(one for one in hostinfo.services or () if 0 <= one.port <= 65535)[:_MAX_ITEMS] or None,
        ssh_host_keys=_bounded(hostinfo.ssh_host_keys),
        app_connector=hostinfo.app_connector,
        peer_relay=hostinfo.peer_relay,
        ingress_enabled=hostinfo.ingress_enabled,
        location=location,
        wol_macs=_bounded(hostinfo.wol_macs),
    )


def _bounded(texts: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return tuple(text for text in (texts or ())[:_MAX_ITEMS] if len(text) <= _MAX_KEY_TEXT) or None


def profile(user_id: int, user: User | None) -> UserProfile:
    if user_id == TAGGED_USER_ID:
        return UserProfile(id=user_id, login_name=TAGGED_LOGIN, display_name="Tagged Devices")
    if user is None:
        return UserProfile(id=user_id, login_name=f"user-{user_id}", display_name=f"user-{user_id}")
    return UserProfile(id=user_id, login_name=user.login_name, display_name=user.name)


def dns_config(config: CoordConfig) -> DNSConfig:
    """MagicDNS on, the tailnet's own domain first."""
    return DNSConfig(
        resolvers=config.resolvers or None,
        routes={config.base_domain: None, **config.split_dns},
        domains=(config.base_domain,),
        proxied=True,
    )

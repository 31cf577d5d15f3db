"""Verdicts about this machine: device, rights, routes, firewall, forwarding, names. tailscale's traps: net/netutil."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network
from typing import Any

from tsctl.doctor.checks_daemon import need_daemon, need_running
from tsctl.doctor.facts import Facts
from tsctl.doctor.verdict import NOTE, Check, Finding, Skipped
from tsd.localapi.schema import RUNNING

NETFILTER_ON = 2
OWN_RANGES = tuple(ip_network(text) for text in ("100.64.0.0/10", "fd7a:115c:a1e0::/48"))
SERVICES = ("100.100.100.100", "fd7a:115c:a1e0::53")
AROUND_BYTES = 80
"""WireGuard, UDP and IPv6 around a packet of the tailnet."""
MAKE_TUN = (
    "modprobe tun; or mkdir -p /dev/net && mknod /dev/net/tun c 10 200; in a container: --device=/dev/net/tun"
    " --cap-add=NET_ADMIN; or run with --tun=userspace-networking"
)


def need_device(facts: Facts) -> None:
    """Routes and firewall matter only with a network device in our network namespace."""
    need_daemon(facts)
    if not facts.daemon.has_device:
        raise Skipped("userspace networking")
    if not facts.box.is_same_network:
        raise Skipped("the daemon lives in another network namespace")


def need_report(facts: Facts) -> None:
    need_device(facts)
    if not facts.daemon.hull:
        raise Skipped("only root may ask tsd" if facts.daemon.is_tsd else "tailscaled does not tell")


def device(facts: Facts) -> Iterator[Finding]:
    if not facts.box.is_linux:
        raise Skipped("only on Linux")
    because = str(facts.daemon.hull.get("FallbackBecause") or "")
    if facts.daemon.answers and (facts.daemon.has_device or not because):
        is_wanted = facts.daemon.has_device and facts.daemon.state == RUNNING
        if is_wanted and facts.daemon.hull.get("IsUp") is False:
            name = facts.daemon.hull.get("Device")
            if f"the interface {name}" in (facts.daemon.hull.get("Missing") or ()):
                cause = f"the interface {name} is not here any more: renamed, or moved to another network namespace"
                yield Finding("hull", cause, "systemctl restart tsd, which makes it again")
            else:
                yield Finding("hull", f"the interface {name} was set down by hand", f"ip link set {name} up")
        return
    if because:
        cause = f"userspace networking is used, because no network device could be made: {because}"
        yield Finding("hull", cause, MAKE_TUN if facts.box.has_tun is False else "")
    elif facts.box.is_root and facts.box.has_tun is False:
        yield Finding("hull", "/dev/net/tun is missing, so there can be no network device", MAKE_TUN)


def rights(facts: Facts) -> Iterator[Finding]:
    if facts.box.can_net_admin is None:
        raise Skipped("only root can see the daemon's rights")
    if facts.daemon.answers and not facts.daemon.has_device and not facts.daemon.hull.get("FallbackBecause"):
        return
    if not facts.box.can_net_admin and (facts.daemon.answers or facts.box.is_root):
        who = "the daemon" if facts.daemon.answers else "root here"
        cause = f"{who} lacks the capability CAP_NET_ADMIN, so devices, routes and firewall cannot be set"
        fix = "container: --cap-add=NET_ADMIN; systemd: CapabilityBoundingSet=CAP_NET_ADMIN; or userspace networking"
        yield Finding("hull", cause, fix)


def routing(facts: Facts) -> Iterator[Finding]:
    need_report(facts)
    hull = facts.daemon.hull
    missing, before = list(hull.get("Missing") or ()), facts.daemon.missing_before
    if f"the interface {hull.get('Device')}" in missing:
        raise Skipped("there is no device")
    if missing:
        cause = f"missing on this host: {'; '.join(missing)}"
        if before:
            cause += " (looked twice: something takes it away, or tsd cannot put it back)"
        yield Finding("hull", cause, _FIND_THE_TAKER)
    elif before:
        cause = f"something removed {'; '.join(before)}, and tsd put it back while we looked"
        yield Finding("hull", cause, _FIND_THE_TAKER)
    if not missing:
        yield from _detours(hull)
    if hull.get("IPv6OffBecause"):
        yield Finding("hull", f"the tailnet has no IPv6 here, because {hull['IPv6OffBecause']}", "", NOTE)


def _detours(hull: dict[str, Any]) -> Iterator[Finding]:
    """Rules of other programs (VPNs, mwan3, VRFs) that are asked before ours."""
    found = [one for one in hull.get("Detours") or () if isinstance(one, dict)]
    if not found:
        return
    way = f"by {found[0]['By']}" if found[0].get("By") else "nowhere"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    cause = f"this host sends packets for {found[0].get('To')}{more} {way} instead of through {hull.get('Device')}"
    rules = list(dict.fromkeys(rule for one in found for rule in one.get("Rules") or ()))
    cause += ", because a rule of another program is asked before ours" if rules else ": routing is not as tsd set it"
    moved = " && ".join(rules[:_MOST_RULES])
    fix = f"{moved}, so that it is asked after ours" if rules else "look at `ip rule` and `ip route get`"
    yield Finding("hull", cause, fix)


_MOST_RULES = 6
_FIND_THE_TAKER = (
    "see who does it with `ip monitor rule route` and `nft monitor`: systemd-networkd (set"
    " ManageForeignRoutingPolicyRules=no and ManageForeignRoutes=no), a firewall script that flushes, cron"
)


def firewall(facts: Facts) -> Iterator[Finding]:
    need_report(facts)
    name = str(facts.daemon.hull.get("Device"))
    forwards = bool(_advertised(facts))
    for drop in facts.daemon.hull.get("ForeignDrops") or ():
        family, _, chain = str(drop.get("Chain")).partition(" ")
        if drop.get("Hook") == "forward" and not forwards:
            continue
        what = _DROPPED.get(str(drop.get("Hook")), "comes in on")
        cause = f"the firewall chain {family} {chain} drops what {what} {name} ({drop.get('Why')})"
        fix = drop.get("Fix") or f"nft insert rule {family} {chain} iifname {name} accept"
        yield Finding("hull", cause, f"{fix}, and keep it there")
    for chain, why in facts.box.legacy_drops:
        if chain == "FORWARD" and not forwards:
            continue
        cause = f"iptables-legacy has {why} in {chain}, whatever nftables says"
        yield Finding("hull", cause, f"iptables-legacy -I {chain} -i {name} -j ACCEPT")


_DROPPED = {"forward": "is forwarded from", "output": "goes out on", "postrouting": "goes out on"}


def reverse_path(facts: Facts) -> Iterator[Finding]:
    """Strict reverse path filtering kills the answers to our own sockets when the default route is the tunnel's."""
    need_device(facts)
    if not (facts.daemon.prefs.get("ExitNodeID") or facts.daemon.prefs.get("ExitNodeIP")):
        raise Skipped("no exit node is used")
    sysctl = facts.box.sysctl
    mode_on = facts.daemon.prefs.get("NetfilterMode") == NETFILTER_ON
    for name in facts.box.default_interfaces:
        strict = max(_number(sysctl, f"net/ipv4/conf/{one}/rp_filter") for one in ("all", name)) == 1
        valid = max(_number(sysctl, f"net/ipv4/conf/{one}/src_valid_mark") for one in ("all", name)) == 1
        if strict and not (mode_on and valid):
            cause = f"rp_filter is strict on {name}: with an exit node, answers to the daemon itself are dropped"
            fix = f"sysctl -w net.ipv4.conf.{name}.rp_filter=2 net.ipv4.conf.all.rp_filter=2, or --netfilter-mode=on"
            yield Finding("hull", cause, fix)


def forwarding(facts: Facts) -> Iterator[Finding]:
    need_device(facts)
    routes = _advertised(facts)
    if not routes:
        raise Skipped("no routes are advertised")
    listed = ", ".join(routes)
    for version, key, label in ((4, "net/ipv4/ip_forward", "IPv4"), (6, "net/ipv6/conf/all/forwarding", "IPv6")):
        if not any(ip_network(route, strict=False).version == version for route in routes):
            continue
        sysctl, base = facts.box.sysctl, f"net/ipv{version}/conf/"
        if key not in sysctl or _number(sysctl, key) >= 1:
            continue
        names = [name for name in facts.box.mtu_bytes if name != "lo"]
        per_interface = [name for name in names if _number(sysctl, f"{base}{name}/forwarding") >= 1]
        if version == 4 and len(per_interface) >= 2:  # the global switch is only a default there
            continue
        dotted = key.replace("/", ".")
        cause = f"{listed} is advertised, but this machine does not forward {label} ({dotted}=0)"
        yield Finding("hull", cause, f"sysctl -w {dotted}=1, and in /etc/sysctl.d/99-tsd.conf to keep it")


def _advertised(facts: Facts) -> list[str]:
    """Advertised networks, without single addresses (this machine's own)."""
    found = []
    for text in facts.daemon.prefs.get("AdvertiseRoutes") or ():
        try:
            prefix = ip_network(str(text), strict=False)
        except ValueError:
            continue
        if prefix.prefixlen < prefix.max_prefixlen:
            found.append(str(text))
    return found


def overlap(facts: Facts) -> Iterator[Finding]:
    need_running(facts)
    if facts.daemon.prefs.get("RouteAll") is not True:
        raise Skipped("routes of others are not accepted")
    for peer in (facts.daemon.status.get("Peer") or {}).values():
        for text in peer.get("PrimaryRoutes") or ():
            route = ip_network(str(text), strict=False)
            for network, name in facts.box.networks:
                mine = ip_network(network, strict=False)
                if route.prefixlen > 0 and route.version == mine.version and route.overlaps(mine):
                    who = str(peer.get("DNSName") or peer.get("HostName")).partition(".")[0]
                    cause = f"{who} offers {route}, but this machine is itself in {mine} ({name}): that network wins"
                    fix = "right, when it is the same network; else renumber one, or advertise it as 4via6"
                    yield Finding("network", cause, fix, NOTE)


def cgnat(facts: Facts) -> Iterator[Finding]:
    need_device(facts)
    for network, name in facts.box.networks:
        mine = ip_network(network, strict=False)
        if any(mine.version == own.version and mine.overlaps(own) for own in OWN_RANGES) and mine.prefixlen:
            cause = f"{name} is in {mine}, inside the range that the tailnet uses"
            yield Finding("network", cause, "none needed: that network wins; peers inside it are not reached", NOTE)


def mtu(facts: Facts) -> Iterator[Finding]:
    if not facts.box.is_same_network:
        raise Skipped("the daemon lives in another network namespace")
    needed = facts.daemon.mtu_bytes + AROUND_BYTES
    for name in facts.box.default_interfaces:
        size = facts.box.mtu_bytes.get(name, 0)
        if 0 < size < needed:
            cause = f"the MTU of {name} is {size}: full packets of the tailnet need {needed}"
            fix = f"ip link set {name} mtu {needed} or more; if that cannot be, tsd --mtu={size - AROUND_BYTES}"
            yield Finding("network", cause, fix)


def names(facts: Facts) -> Iterator[Finding]:
    need_running(facts)
    need_device(facts)
    if facts.name is None:
        raise Skipped("MagicDNS or --accept-dns is off")
    own = set(facts.daemon.status.get("TailscaleIPs") or ())
    if own & set(facts.name.addresses):
        return
    said = facts.name.error or f"it says {', '.join(facts.name.addresses) or 'nothing'}"
    cause = f"this host does not resolve its own tailnet name {facts.name.name} ({said})"
    yield Finding("hull", *_why_no_names(facts, cause))


def _why_no_names(facts: Facts, cause: str) -> tuple[str, str]:
    """(cause, fix): what tsd could not set, its own resolver cut off, or a host that asks somebody else."""
    refused = str((facts.daemon.warnings.get("dns-set-os-config-failed") or {}).get("Text") or "")
    servers = ", ".join(facts.box.nameservers) or "no nameserver"
    owner = f", written by {facts.box.resolver_owner}" if facts.box.resolver_owner else ""
    asks_us = any(server in SERVICES for server in facts.box.nameservers[:1])
    if refused:
        return f"{cause}: {refused}", "put that right, or tsctl set --accept-dns=false"
    if facts.name is not None and facts.name.service_trouble and asks_us:
        cause += f"; resolv.conf leads to tsd, but {SERVICES[0]} is cut off here: {facts.name.service_trouble}"
        return cause, "see the findings on routing and firewall; `nft list ruleset` and `ip route get 100.100.100.100`"
    if asks_us:
        fix = "look at the line `hosts:` of /etc/nsswitch.conf: it needs `dns`, and nothing before it that says no"
        return f"{cause}; resolv.conf leads to tsd, which answers", fix
    fix = "let only one program write /etc/resolv.conf (tsd puts its own back in 5 s), or tsctl set --accept-dns=false"
    return f"{cause}; resolv.conf: {servers}{owner}", fix


def _number(sysctl: dict[str, str], name: str) -> int:
    text = sysctl.get(name, "")
    return int(text) if text.isdecimal() else 0


CHECKS = (
    Check("device", "a network device, when one was asked for", device, ("device-down",)),
    Check("rights", "CAP_NET_ADMIN", rights),
    Check(
        "routing",
        "our rules, routes and firewall are in place",
        routing,
        ("router-failed", "routing-fight", "routing-detour"),
    ),
    Check("firewall", "no foreign rule drops our traffic", firewall, ("foreign-drop",)),
    Check("rp-filter", "strict rp_filter does not cut us off", reverse_path, ("rp-filter-strict",)),
    Check("ip-forwarding", "forwarding is on for advertised routes", forwarding, ("ip-forwarding-off",)),
    Check("lan-overlap", "accepted routes are not our own network", overlap, ("lan-overlap",)),
    Check("cgnat", "no other interface in the tailnet's range", cgnat),
    Check("mtu", "the underlay carries full packets", mtu),
    Check("names", "the host resolves tailnet names", names, ("dns-set-os-config-failed", "resolv-conf-overwritten")),
)

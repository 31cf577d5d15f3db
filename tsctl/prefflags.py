"""The settings that `up`, `set` and `get` share: a flag, the preferences behind it, and the way there and back.

Preferences are the daemon's JSON (tailscale: `ipn/prefs.go`); a flag is a bool or a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tsctl import context as ctx
from tsctl.goflags import Failure, Flag, UsageError
from tsd.localapi.schema import DEFAULT_CONTROL_URL

Prefs = dict[str, Any]
Value = bool | str
EXIT_ROUTES = ("0.0.0.0/0", "::/0")
NETFILTER_MODES = ("off", "nodivert", "on")
NETFILTER_BACKENDS = {
    "auto": "",
    "nft": "nftables",
    "iptables": "iptables",
    "iptables-nft": "iptables-nft",
    "iptables-legacy": "iptables-legacy",
}


class Setting:
    """`read` gives the flag's value in these prefs; `write` puts a plain value into prefs (None: see `edit`)."""

    def __init__(
        self,
        flag: Flag,
        prefs: Sequence[str],
        read: Callable[[Prefs, dict[str, Any]], Value],
        write: Callable[[Prefs, Any], None],
        *,
        is_in_up: bool = True,
        is_in_set: bool = True,
    ) -> None:
        self.flag = flag
        self.name = flag.name
        self.prefs = tuple(prefs)
        self.read = read
        self.write = write
        self.is_in_up = is_in_up
        self.is_in_set = is_in_set


def _plain(name: str, summary: str, pref: str, default: Value = False, **places: bool) -> Setting:
    def read(prefs: Prefs, status: dict[str, Any]) -> Value:
        found = prefs.get(pref)
        return bool(found) if isinstance(default, bool) else str(found or "")

    def write(prefs: Prefs, value: Any) -> None:
        prefs[pref] = value

    return Setting(Flag(name, summary, default), (pref,), read, write, **places)


def _inverted(name: str, summary: str, pref: str, default: bool) -> Setting:
    def write(prefs: Prefs, value: Any) -> None:
        prefs[pref] = not value

    return Setting(Flag(name, summary, default), (pref,), lambda prefs, status: not prefs.get(pref), write)


def _nested(name: str, summary: str, pref: str, key: str, default: bool, **places: bool) -> Setting:
    def write(prefs: Prefs, value: Any) -> None:
        prefs[pref] = {**(prefs.get(pref) or {}), key: value}

    def read(prefs: Prefs, status: dict[str, Any]) -> Value:
        return bool((prefs.get(pref) or {}).get(key))

    return Setting(Flag(name, summary, default), (pref,), read, write, **places)


def _listed(name: str, summary: str, pref: str, parse: Callable[[str], list[str]], **places: bool) -> Setting:
    def write(prefs: Prefs, value: Any) -> None:
        prefs[pref] = parse(value) or None

    def read(prefs: Prefs, status: dict[str, Any]) -> Value:
        return ",".join(str(one) for one in prefs.get(pref) or [])

    return Setting(Flag(name, summary), (pref,), read, write, **places)


def split_list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_tags(text: str) -> list[str]:
    tags = [word if ":" in word else f"tag:{word}" for word in split_list(text)]
    for tag in tags:
        name = tag.removeprefix("tag:")
        if not tag.startswith("tag:") or not name:
            raise UsageError(f"tag {ctx.quoted(tag)}: a tag is written tag:name")
        if not name[0].isalpha() or not all(c.isascii() and (c.isalnum() or c == "-") for c in name):
            raise UsageError(
                f"tag {ctx.quoted(tag)}: a name starts with a letter and holds letters, digits and dashes only"
            )
    return tags


def parse_routes(text: str) -> list[str]:
    """Prefixes in canonical form, sorted by length, then address."""
    import ipaddress

    from tsd.base.addr import is_via_route

    found = []
    for word in split_list(text):
        try:
            network = ipaddress.ip_network(word, strict=False)
            address = ipaddress.ip_interface(word).ip
        except ValueError:
            raise UsageError(f"{ctx.quoted(word)} is not a valid IP prefix, such as 192.0.2.0/24") from None
        if "/" not in word:
            raise UsageError(f"{ctx.quoted(word)} is not a prefix: write {network}")
        if address != network.network_address:
            raise UsageError(f"{word} has non-address bits set; expected {network}")
        if is_via_route(network) and (network.prefixlen < 96 or int(address) >> 32 & 0xFFFFFFFF > 0xFFFF):
            raise UsageError(f"{word} is no 4via6 route: it has a site from 0 to 65535 and at least /96")
        found.append(network)
    texts = [str(one) for one in sorted(set(found), key=lambda one: (one.prefixlen, one.version, int(one[0])))]
    for lone, other in (EXIT_ROUTES, EXIT_ROUTES[::-1]):
        if lone in texts and other not in texts:
            raise UsageError(
                f"{lone} advertised without its counterpart; also advertise {other}, or --advertise-exit-node"
            )
    return texts


def needs_forwarding(values: dict[str, Any]) -> bool:
    """Whether flags offer something that the kernel must forward to; to 4via6 routes the daemon does it itself."""
    from tsd.base.addr import is_via_route, parse_prefix

    if values["advertise-exit-node"] or values["advertise-connector"]:
        return True
    return not all(is_via_route(parse_prefix(route)) for route in parse_routes(values["advertise-routes"]))


def advertised(routes: str, is_exit_node: bool) -> list[str] | None:
    found = parse_routes(routes)
    extra = [one for one in EXIT_ROUTES if is_exit_node and one not in found]
    return parse_routes(",".join((*extra, *found))) or None


def offers_exit(prefs: Prefs) -> bool:
    routes = prefs.get("AdvertiseRoutes") or []
    return all(one in routes for one in EXIT_ROUTES)


def plain_routes(prefs: Prefs) -> str:
    return ",".join(one for one in prefs.get("AdvertiseRoutes") or [] if one not in EXIT_ROUTES)


def _write_routes(prefs: Prefs, value: Any) -> None:
    prefs["AdvertiseRoutes"] = advertised(value, offers_exit(prefs))


def _write_exit_offer(prefs: Prefs, value: Any) -> None:
    prefs["AdvertiseRoutes"] = advertised(plain_routes(prefs), value)


def _read_exit_node(prefs: Prefs, status: dict[str, Any]) -> Value:
    if prefs.get("AutoExitNode"):
        return f"auto:{prefs['AutoExitNode']}"
    if prefs.get("ExitNodeIP"):
        return str(prefs["ExitNodeIP"])
    wanted = prefs.get("ExitNodeID")
    if not wanted:
        return ""
    for peer in ctx.peers_of(status):
        if peer.get("ID") == wanted and peer.get("TailscaleIPs"):
            return str(peer["TailscaleIPs"][0])
    return str(wanted)


def _write_exit_node(prefs: Prefs, value: Any) -> None:
    """`value` is resolved already: "", an address, or auto:EXPR."""
    prefs["ExitNodeID"], prefs["ExitNodeIP"], prefs["AutoExitNode"] = "", "", ""
    if value.startswith("auto:"):
        prefs["AutoExitNode"] = value.removeprefix("auto:")
    else:
        prefs["ExitNodeIP"] = value


def _write_netfilter(prefs: Prefs, value: Any) -> None:
    if value not in NETFILTER_MODES:
        raise UsageError(f"invalid value --netfilter-mode={ctx.quoted(value)}; one of on, nodivert, off")
    prefs["NetfilterMode"] = NETFILTER_MODES.index(value)


def _read_netfilter(prefs: Prefs, status: dict[str, Any]) -> Value:
    mode = prefs.get("NetfilterMode")
    return NETFILTER_MODES[mode] if isinstance(mode, int) and 0 <= mode < len(NETFILTER_MODES) else str(mode)


def _write_backend(prefs: Prefs, value: Any) -> None:
    if value not in NETFILTER_BACKENDS:
        known = ", ".join(NETFILTER_BACKENDS)
        raise UsageError(f"invalid value --netfilter-backend={ctx.quoted(value)}; one of {known}")
    prefs["NetfilterKind"] = NETFILTER_BACKENDS[value]


def _read_backend(prefs: Prefs, status: dict[str, Any]) -> Value:
    kind = str(prefs.get("NetfilterKind") or "")
    return next((word for word, name in NETFILTER_BACKENDS.items() if name == kind), kind)


def _write_relay_port(prefs: Prefs, value: Any) -> None:
    if value == "":
        prefs["RelayServerPort"] = None
        return
    if not (value.isascii() and value.isdigit() and int(value) <= 65535):
        raise UsageError(f"failed to set relay server port: {ctx.quoted(value)} is not a port number")
    prefs["RelayServerPort"] = int(value)


def _read_relay_port(prefs: Prefs, status: dict[str, Any]) -> Value:
    port = prefs.get("RelayServerPort")
    return "" if port is None else str(port)


_SET_ONLY = {"is_in_up": False}
_UP_ONLY = {"is_in_set": False}

SETTINGS = (
    _plain("accept-dns", "use the DNS settings of the tailnet", "CorpDNS", True),
    _plain("accept-routes", "use the subnets that other nodes advertise", "RouteAll"),
    _nested("advertise-connector", "offer this node as an app connector", "AppConnector", "Advertise", False),
    Setting(
        Flag("advertise-exit-node", "offer this node as an exit node", False),
        ("AdvertiseRoutes",),
        lambda prefs, status: offers_exit(prefs),
        _write_exit_offer,
    ),
    Setting(
        Flag("advertise-routes", "subnets to advertise, such as 10.0.0.0/8,192.168.0.0/24; empty for none"),
        ("AdvertiseRoutes",),
        lambda prefs, status: plain_routes(prefs),
        _write_routes,
    ),
    _listed("advertise-tags", "tags to ask for, such as tag:web,tag:db", "AdvertiseTags", parse_tags, **_UP_ONLY),
    _nested("auto-update", "update by itself", "AutoUpdate", "Apply", False, **_SET_ONLY),
    Setting(
        Flag("exit-node", "exit node to use: IP, name, or auto:any; empty for none"),
        ("ExitNodeIP", "ExitNodeID", "AutoExitNode"),
        _read_exit_node,
        _write_exit_node,
    ),
    _plain("exit-node-allow-lan-access", "reach the local network beside the exit node", "ExitNodeAllowLANAccess"),
    _plain("hostname", "name to use instead of the one of the OS", "Hostname", ""),
    _plain("login-server", "the coordination server", "ControlURL", DEFAULT_CONTROL_URL, **_UP_ONLY),
    Setting(
        Flag("netfilter-backend", "auto, nft or iptables: where the firewall rules are written", "auto"),
        ("NetfilterKind",),
        _read_backend,
        _write_backend,
    ),
    Setting(Flag("netfilter-mode", "on, nodivert or off", "on"), ("NetfilterMode",), _read_netfilter, _write_netfilter),
    _plain("nickname", "name of this login profile", "ProfileName", "", **_SET_ONLY),
    _plain("operator", "user who may operate tsd without being root", "OperatorUser", ""),
    Setting(
        Flag("relay-server-port", "port to relay for peers; 0 for any, empty for off"),
        ("RelayServerPort",),
        _read_relay_port,
        _write_relay_port,
        **_SET_ONLY,
    ),
    _listed(
        "relay-server-static-endpoints",
        "ip:port list under which the relay is reachable",
        "RelayServerStaticEndpoints",
        split_list,
        **_SET_ONLY,
    ),
    _plain("report-posture", "let control collect facts about this device", "PostureChecking"),
    _plain("shields-up", "refuse incoming connections", "ShieldsUp"),
    _inverted("snat-subnet-routes", "hide the sources of traffic to advertised subnets", "NoSNAT", True),
    _plain("ssh", "run the SSH server", "RunSSH"),
    _inverted("stateful-filtering", "filter forwarded traffic by connection state", "NoStatefulFiltering", False),
    _nested("update-check", "tell about new versions", "AutoUpdate", "Check", True, **_SET_ONLY),
    _plain("webclient", "run the web interface on port 5252", "RunWebClient", False, **_SET_ONLY),
)
FLAG_ALIASES = {"report-posture": ("posture-checking",)}
UP_SETTINGS = tuple(setting for setting in SETTINGS if setting.is_in_up)
SET_SETTINGS = tuple(setting for setting in SETTINGS if setting.is_in_set)


def flags_of(settings: Sequence[Setting]) -> tuple[Flag, ...]:
    for setting in settings:
        setting.flag.aliases = FLAG_ALIASES.get(setting.name, ())
    return tuple(setting.flag for setting in settings)


def masked(prefs: Prefs, names: Sequence[str]) -> Prefs:
    """The edit that sets these preferences and no others."""
    found: Prefs = {}
    for name in names:
        found[name] = prefs.get(name)
        if name == "AutoUpdate":
            found["AutoUpdateSet"] = {"CheckSet": True, "ApplySet": True}
        else:
            found[f"{name}Set"] = True
    return found


def resolve_exit_node(word: str, status: dict[str, Any]) -> str:
    """The address of the exit node people mean. Raises Failure with the reason."""
    from tsctl.addresses import find_peer
    from tsctl.status import is_ip

    if not word or (word.startswith("auto:") and word != "auto:"):
        return word
    own = ctx.own_addresses(status)
    if is_ip(word):
        if word in own:
            raise Failure(f"cannot use {word} as an exit node: it is this machine; did you mean --advertise-exit-node?")
        peer = next((one for one in ctx.peers_of(status) if word in (one.get("TailscaleIPs") or [])), None)
        if peer is None and ctx.peers_of(status):
            raise Failure(f"no node found in netmap with IP {word}")
    else:
        peer = _exit_node_named(word, status, find_peer(status, word))
    if peer is not None and not peer.get("ExitNodeOption"):
        shown = word if is_ip(word) else ctx.quoted(word)
        raise Failure(f"node {shown} is not advertising an exit node")
    return word if peer is None else str((peer.get("TailscaleIPs") or [word])[0]) if not is_ip(word) else word


def _exit_node_named(word: str, status: dict[str, Any], peer: dict[str, Any] | None) -> dict[str, Any]:
    if peer is None and not status.get("CurrentTailnet"):
        raise Failure(f"cannot find exit node {ctx.quoted(word)} by name before the network map is here; use its IP")
    if peer is None:
        raise Failure(f"invalid value {ctx.quoted(word)} for --exit-node; must be IP or peer hostname")
    if peer is status.get("Self"):
        raise Failure(f"{ctx.quoted(word)} is this machine; did you mean --advertise-exit-node?")
    suffix = status.get("MagicDNSSuffix") or ""
    same = [one for one in ctx.peers_of(status) if ctx.short_name(one, suffix).lower() == word.lower()]
    if len(same) > 1:
        raise Failure(f"ambiguous exit node name {ctx.quoted(word)}; use its IP")
    return peer

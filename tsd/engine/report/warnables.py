"""The catalogue of warnings: code, severity, what to tell the user, and which other warning explains it away.

Codes and severities: tailscale: tsconst/health.go, health/warnings.go and the features' own. Codes that upstream does
not have are at the end. Texts are ours; `{name}` stands for an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Layer = Literal["engine", "hull", "network", "control"]


@dataclass(frozen=True, slots=True)
class Warnable:
    """A kind of fault. `text_bare` is used when no arguments came with it."""

    code: str
    severity: Literal["high", "medium", "low"]
    layer: Layer
    title: str
    text: str
    text_bare: str = ""
    depends_on: tuple[str, ...] = ()
    visible_after_s: float = 0.0
    impacts_connectivity: bool = False

    def text_for(self, args: Mapping[str, str]) -> str:
        if not args and self.text_bare:
            return self.text_bare
        return self.text.format_map(_Given({name.replace("-", "_"): value for name, value in args.items()}))


class _Given(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return f"(unknown {name.replace('_', ' ')})"


_NET = "network-status"
_OFF = "wantrunning-false"

_ALL = (
    Warnable("update-available", "low", "engine", "Update available", "Version {available_version} is out."),
    Warnable(
        "security-update-available",
        "medium",
        "engine",
        "Security update available",
        "Version {available_version} fixes a security fault; update soon.",
    ),
    Warnable(
        "network-status",
        "medium",
        "network",
        "Network down",
        "No network: this machine has no default route. tsd goes on by itself when there is one.",
        visible_after_s=5.0,
        impacts_connectivity=True,
    ),
    Warnable(_OFF, "low", "engine", "Stopped", "tsd is stopped. Start it with `tsctl up`."),
    Warnable(
        "login-state",
        "medium",
        "control",
        "Logged out",
        "Not logged in; the last attempt failed: {error}. Log in with `tsctl up`.",
        text_bare="Not logged in. Log in with `tsctl up`.",
        depends_on=(_OFF,),
    ),
    Warnable(
        "not-in-map-poll",
        "medium",
        "control",
        "Out of sync",
        "The coordination server does not answer: {error}. Known peers stay reachable, changes do not arrive.",
        text_bare="The coordination server does not answer. Known peers stay reachable, changes do not arrive.",
        depends_on=(_NET, _OFF, "using-cached-netmap", "no-control"),
        visible_after_s=480.0,
    ),
    Warnable(
        "no-control",
        "medium",
        "control",
        "Coordination server not reached",
        "The coordination server has not been reached yet: {error}. tsd keeps trying.",
        depends_on=(_NET, _OFF, "using-cached-netmap"),
        visible_after_s=2.0,
    ),
    Warnable(
        "no-derp-home",
        "medium",
        "network",
        "No home relay",
        "No relay could be reached, so peers may not find us. Check that TCP 443 to the relays is allowed;"
        " `tsctl netcheck` shows each.",
        depends_on=(_NET,),
        visible_after_s=10.0,
        impacts_connectivity=True,
    ),
    Warnable(
        "no-derp-connection",
        "medium",
        "network",
        "Relay not connected",
        "No connection to the relay {derp_region_name}: {error}. tsd keeps trying; `tsctl netcheck` shows the others.",
        depends_on=(_NET, _OFF, "no-derp-home"),
        visible_after_s=10.0,
        impacts_connectivity=True,
    ),
    Warnable(
        "derp-timed-out",
        "medium",
        "network",
        "Relay silent",
        "The relay {derp_region_name} has been silent for {duration}. tsd reconnects by itself.",
        depends_on=(_NET, _OFF, "no-derp-connection", "no-derp-home"),
    ),
    Warnable(
        "derp-region-error",
        "low",
        "network",
        "Relay reports a fault",
        "The relay {derp_region_id} reports: {error}.",
        depends_on=(_NET,),
    ),
    Warnable(
        "no-udp4-bind",
        "medium",
        "hull",
        "No UDP socket",
        "UDP could not be opened ({error}), so every connection goes through a relay. Free the port or pass another"
        " --port.",
        text_bare="UDP could not be opened, so every connection goes through a relay. Free the port or pass another"
        " --port.",
        depends_on=(_NET, _OFF),
        impacts_connectivity=True,
    ),
    Warnable(
        "mapresponse-timeout",
        "medium",
        "control",
        "Coordination server silent",
        "Nothing came from the coordination server for {duration}; connecting anew.",
        text_bare="Nothing came from the coordination server for over two minutes; connecting anew.",
        depends_on=(_NET, _OFF),
    ),
    Warnable(
        "tls-connection-failed",
        "medium",
        "network",
        "TLS failed",
        "A TLS connection failed: {error}. If this network inspects TLS, let the coordination server and the relays"
        " through; if the clock is wrong, set it.",
        depends_on=(_NET,),
    ),
    Warnable("test-warnable", "low", "engine", "Test", "A warning for tests."),
    Warnable(
        "apply-disk-config",
        "medium",
        "engine",
        "Configuration file not applied",
        "The file given to --config could not be applied: {error}.",
    ),
    Warnable("warming-up", "low", "engine", "Starting", "tsd is starting."),
    Warnable(
        "ip-forwarding-off",
        "medium",
        "hull",
        "IP forwarding is off",
        "Routes are advertised but this machine does not forward: {error}.",
        impacts_connectivity=True,
    ),
    Warnable(
        "tls-cert-pending", "low", "engine", "Certificate pending", "The certificate for {domain} is being issued."
    ),
    Warnable(
        "dns-forward-failing",
        "medium",
        "network",
        "DNS servers do not answer",
        "None of the DNS servers {dns_servers} answers. Check that they are reachable from here (127.x: that the"
        " resolver of this machine runs).",
        depends_on=(_NET,),
        visible_after_s=15.0,
        impacts_connectivity=True,
    ),
    Warnable(
        "path-too-narrow",
        "medium",
        "network",
        "Large packets vanish",
        "Full-sized packets to {peers} vanish on the direct path while small ones arrive, so the relay is used where"
        " there is one. Let ICMP `fragmentation needed` through on the way, or start tsd with --mtu={mtu} here.",
        depends_on=(_NET,),
    ),
    Warnable(
        "dns-set-os-config-failed",
        "medium",
        "hull",
        "DNS settings not applied",
        "The DNS settings of this machine could not be changed: {error}. Tailnet names do not resolve here.",
        depends_on=(_NET,),
    ),
    Warnable(
        "state-store-health",
        "high",
        "hull",
        "State not readable",
        # Word for word: tools look for this beginning.
        "State store failed to initialize, Tailscale will not work until this is resolved."
        " See https://tailscale.com/s/state-store-init-error. Error: {error}",
    ),
    Warnable(
        "invalid-packet-filter",
        "high",
        "control",
        "Packet filter not understood",
        "The coordination server sent a packet filter that cannot be applied ({error}); everything inbound is blocked.",
        impacts_connectivity=True,
    ),
    Warnable(
        "tailnet-lock",
        "high",
        "control",
        "Locked out",
        "this node is locked out; it will not have connectivity until it is signed. Run on a trusted node:"
        " tsctl lock sign {node_key} {lock_key}",
        impacts_connectivity=True,
    ),
    Warnable(
        "tailnet-lock-unverified",
        "high",
        "control",
        "Tailnet lock cannot be verified",
        "Tailnet lock is on, but nobody's signature can be verified here ({error}), so all peers are kept out. tsd goes"
        " on trying; `tsctl lock local-disable` lets them in without it.",
        impacts_connectivity=True,
    ),
    Warnable(
        "tailnet-lock-behind",
        "medium",
        "control",
        "No news of tailnet lock",
        "What changed in tailnet lock does not reach this node ({error}); what it knew before is in force. If the lock"
        " was switched off and on again meanwhile, `tsctl lock local-disable` makes it forget the old one.",
        visible_after_s=30.0,
    ),
    Warnable(
        "captive-portal-detected",
        "high",
        "network",
        "Captive portal",
        "This network wants you to log in first. Open a web page in a browser.",
        depends_on=(_OFF,),
        impacts_connectivity=True,
    ),
    # Ours:
    Warnable(
        "using-cached-netmap",
        "medium",
        "control",
        "Netmap of the last run",
        "The netmap of {age} ago is in use, because the coordination server does not answer: {error}. Peers known then"
        " are reachable; changes do not arrive. tsd keeps trying.",
        depends_on=(_NET, _OFF),
        visible_after_s=5.0,
    ),
    Warnable(
        "state-store-write",
        "high",
        "hull",
        "State not saved",
        "The state could not be saved: {error}. tsd works on and retries; after a restart this machine may have to log"
        " in again.",
    ),
    Warnable(
        "state-store-recovered",
        "low",
        "hull",
        "State recovered",
        "{error}",
    ),
    Warnable(
        "profile-set-aside",
        "medium",
        "engine",
        "A profile cannot be read",
        "Stored profiles that cannot be read are set aside: {error}. The others work; log in again to replace them.",
    ),
    Warnable(
        "key-expired",
        "high",
        "control",
        "Key expired",
        "The key of this node has expired. Log in again with `tsctl up`.",
        impacts_connectivity=True,
    ),
    Warnable(
        "clock-wrong",
        "medium",
        "hull",
        "Clock is wrong",
        "The clock of this machine is {difference} that of the coordination server. Set it; tsd goes on by itself.",
    ),
    Warnable(
        "router-failed",
        "high",
        "hull",
        "Routes not applied",
        "Routes or firewall rules could not be applied: {error}.",
        impacts_connectivity=True,
    ),
    Warnable(
        "device-down",
        "high",
        "hull",
        "Network device is down",
        "Nothing goes through the tailnet, because the interface {error}.",
        visible_after_s=2.0,
        impacts_connectivity=True,
    ),
    Warnable(
        "routing-fight",
        "medium",
        "hull",
        "Another program undoes our settings",
        "{error} again and again, and tsd puts it back. Let that program leave it alone (for systemd-networkd:"
        " ManageForeignRoutingPolicyRules=no), or use --netfilter-mode=nodivert.",
        impacts_connectivity=True,
    ),
    Warnable(
        "routing-detour",
        "high",
        "hull",
        "Another program routes tailnet traffic elsewhere",
        "A routing rule of another program is asked before ours, so {error}.",
        impacts_connectivity=True,
    ),
    Warnable(
        "foreign-drop",
        "high",
        "hull",
        "Another firewall drops tailnet traffic",
        "A firewall rule that is not ours drops what comes through the tailnet. {error}.",
        impacts_connectivity=True,
    ),
    Warnable(
        "lan-overlap",
        "low",
        "hull",
        "Accepted routes overlap this network",
        "Peers offer {error}, which this machine is in itself: its own network is used, not the peer's route.",
    ),
    Warnable(
        "firewall-incomplete",
        "medium",
        "hull",
        "Firewall rules are incomplete",
        "{error}.",
    ),
    Warnable(
        "rp-filter-strict",
        "high",
        "hull",
        "Strict reverse path filter",
        "rp_filter is strict on {error}, and without our firewall rules answers to tsd's own packets are dropped there"
        " while an exit node is used. Use --netfilter-mode=on, or set rp_filter to 2.",
        impacts_connectivity=True,
    ),
    Warnable(
        "nosnat-with-advertised-exit-node",
        "medium",
        "hull",
        "Exit node without SNAT",
        "This machine is offered as exit node, but --snat-subnet-routes is {error}: answers from the Internet will not"
        " find the way back unless your routers know it.",
    ),
    Warnable(
        "exit-node-gone",
        "high",
        "network",
        "Exit node not available",
        "{error}, so nothing leaves this machine but tsd's own traffic. Choose another one with"
        " `tsctl set --exit-node=NAME`, or none with `tsctl set --exit-node=`.",
        impacts_connectivity=True,
    ),
    Warnable(
        "no-effect",
        "low",
        "engine",
        "Settings without effect",
        "Kept but without effect, because this version of tsd has no such thing: {settings}.",
    ),
    Warnable(
        "key-unused",
        "low",
        "engine",
        "Auth key not used",
        "This node is logged in already, so the auth key given was not used. To use it: `tsctl up --force-reauth`.",
    ),
    Warnable(
        "dns-loop",
        "medium",
        "hull",
        "DNS servers ask each other in a circle",
        "The DNS servers {servers} of this machine have tsd as their own upstream, so they are not asked. Give them"
        " another upstream, or the tailnet a global DNS server.",
    ),
    Warnable(
        "derp-map-empty",
        "medium",
        "control",
        "No relays from the server",
        "The server sent a relay map without a relay; relays known before stay in use, others are missing.",
        impacts_connectivity=True,
    ),
)

WARNABLES: Mapping[str, Warnable] = {warnable.code: warnable for warnable in _ALL}

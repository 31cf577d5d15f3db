"""What doctor says, from made-up facts: each fault alone is named, with its layer and a fix; health gives nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tsctl.doctor.command import CHECKS
from tsctl.doctor.facts import (
    ABSENT,
    DENIED,
    FOREIGN,
    REFUSED,
    SILENT,
    BoxFacts,
    ControlFacts,
    DaemonFacts,
    Facts,
    NameFacts,
    PathFacts,
    Process,
    Reached,
    RelayFacts,
)
from tsctl.doctor.verdict import FAULT, NOTE, Finding, as_json, as_lines, judge

NOW_S = datetime(2026, 3, 1, tzinfo=UTC).timestamp()


def healthy() -> Facts:
    """A connected subnet router with a device and an exit node in use; everything is right."""
    status: dict[str, Any] = {
        "Version": "0.1.0-x",
        "TUN": True,
        "BackendState": "Running",
        "TailscaleIPs": ["100.64.0.1"],
        "Self": {"DNSName": "k.tn.example.", "KeyExpiry": "2026-06-01T00:00:00Z", "Online": True},
        "Peer": {"a": {"DNSName": "r.tn.example.", "PrimaryRoutes": ["10.9.0.0/16"]}},
    }
    prefs = {
        "RouteAll": True,
        "CorpDNS": True,
        "NetfilterMode": 2,
        "ExitNodeID": "n1",
        "AdvertiseRoutes": ["10.1.0.0/16", "fd01::/64", "192.0.2.7/32"],
        "ControlURL": "https://c.example",
    }
    hull = {"Kind": "linux", "Device": "tsd0", "IsUp": True, "Missing": [], "ForeignDrops": [], "FallbackBecause": ""}
    sysctl = {
        "net/ipv4/ip_forward": "1",
        "net/ipv6/conf/all/forwarding": "1",
        "net/ipv4/conf/all/rp_filter": "0",
        "net/ipv4/conf/eth0/rp_filter": "2",
    }
    return Facts(
        DaemonFacts(
            "/run/tsd/tsd.sock",
            pid=7,
            is_tsd=True,
            client_version="0.1.0",
            status=status,
            prefs=prefs,
            report={"Hull": hull, "ControlConnected": True},
        ),
        BoxFacts(
            has_tun=True,
            can_net_admin=True,
            processes=[Process(7, "tsd", "/run/tsd/tsd.sock")],
            sysctl=sysctl,
            mtu_bytes={"lo": 65536, "eth0": 1500, "tsd0": 1280},
            networks=[("192.168.1.0/24", "eth0"), ("fd99::/64", "eth0")],
            default_interfaces=["eth0"],
        ),
        NameFacts("k.tn.example", ["100.64.0.1"]),
        ControlFacts("https://c.example", Reached("ok"), clock_offset_s=0.4),
        RelayFacts("lab", {"lab": Reached("ok"), "far": Reached("ok")}, 2, 2, False),
        [PathFacts("r", "192.0.2.9:41641", True, True)],
        NOW_S,
    )


def test_health_gives_no_finding_and_makes_every_check() -> None:
    verdict = judge(healthy(), CHECKS)
    assert verdict.findings == [] and verdict.is_well
    assert verdict.skipped == {}
    assert as_lines(verdict)[-1] == "All is well."


Break = Callable[[Facts], object]


def _hull(**changes: object) -> Break:
    return lambda f: f.daemon.hull.update(changes)


def _status(**changes: object) -> Break:
    return lambda f: f.daemon.status.update(changes)


def _box(**changes: object) -> Break:
    return lambda f: f.box.__dict__.update(changes)


def _sysctl(**changes: str) -> Break:
    return lambda f: f.box.sysctl.update({f"net/{k.replace('__', '/')}": v for k, v in changes.items()})


def _control(**changes: object) -> Break:
    return lambda f: f.control.__dict__.update(changes)


def _relays(**changes: object) -> Break:
    return lambda f: f.relays.__dict__.update(changes)


_DROP = {"Chain": "inet filter input", "Hook": "input", "Why": "policy drop"}
_OUT_DROP = {"Chain": "inet o out", "Hook": "output", "Why": "policy drop", "Fix": "nft insert rule inet o out x"}
_DETOUR = {"To": "100.64.0.3", "By": "wg0", "Rules": ["ip -4 rule del pref 100"]}
_NOWHERE = {"To": "100.64.0.4", "By": "", "Rules": []}


def _names(f: Facts, servers: list[str], service_trouble: str = "", **warnings: str) -> None:
    f.name.__dict__.update(addresses=[], error="no such name", service_trouble=service_trouble)
    f.box.nameservers = servers
    f.daemon.warnings.update({code.replace("_", "-"): {"Text": text} for code, text in warnings.items()})


_GONE = Reached("tcp", "c.example:443: Connection refused")

FAULTS: list[tuple[str, str, str, str, Break]] = [
    # check, layer, in the cause, in the fix
    (
        "state",
        "control",
        "not logged in",
        "open https://l.example",
        _status(BackendState="NeedsLogin", AuthURL="https://l.example"),
    ),
    ("state", "engine", "stopped", "tsctl up", _status(BackendState="Stopped")),
    ("state", "control", "approval", "approve", _status(BackendState="NeedsMachineAuth")),
    ("key", "control", "expires in 5 days", "--force-reauth", _status(Self={"KeyExpiry": "2026-03-06T00:00:00Z"})),
    ("key", "control", "expired on 2026-02", "--force-reauth", _status(Self={"KeyExpiry": "2026-02-06T00:00:00Z"})),
    ("device", "hull", "set down", "ip link set tsd0 up", _hull(IsUp=False)),
    (
        "device",
        "hull",
        "no network device could be made: no /dev",
        "mknod",
        lambda f: (_hull(FallbackBecause="no /dev/net/tun")(f), _status(TUN=False)(f), _box(has_tun=False)(f)),
    ),
    ("rights", "hull", "CAP_NET_ADMIN", "--cap-add", _box(can_net_admin=False)),
    ("routing", "hull", "the IPv4 rule 5370", "networkd", _hull(Missing=["the IPv4 rule 5370"])),
    (
        "firewall",
        "hull",
        "inet filter input",
        "nft insert rule inet filter input iifname tsd0 accept",
        _hull(ForeignDrops=[_DROP]),
    ),
    ("firewall", "hull", "goes out on tsd0", "inet o out x, and keep", _hull(ForeignDrops=[_OUT_DROP])),
    ("routing", "hull", "by wg0 instead of through tsd0, because", "ip -4 rule del pref 100", _hull(Detours=[_DETOUR])),
    ("routing", "hull", "100.64.0.4 and 1 more nowhere", "pref 100", _hull(Detours=[_NOWHERE, _DETOUR])),
    ("routing", "hull", "100.64.0.4 nowhere", "ip route get", _hull(Detours=[_NOWHERE])),
    ("firewall", "hull", "FORWARD", "iptables-legacy -I FORWARD", _box(legacy_drops=[("FORWARD", "the policy DROP")])),
    (
        "rp-filter",
        "hull",
        "strict on eth0",
        "rp_filter=2",
        _sysctl(ipv4__conf__all__rp_filter="1", ipv4__conf__eth0__rp_filter="0"),
    ),
    ("ip-forwarding", "hull", "IPv4", "net.ipv4.ip_forward=1", _sysctl(ipv4__ip_forward="0")),
    ("ip-forwarding", "hull", "IPv6", "net.ipv6.conf.all.forwarding=1", _sysctl(ipv6__conf__all__forwarding="0")),
    ("mtu", "network", "MTU of eth0 is 1280", "1360", lambda f: f.box.mtu_bytes.update(eth0=1280)),
    (
        "names",
        "hull",
        "does not resolve",
        "resolv.conf",
        lambda f: f.name.__dict__.update(addresses=[], error="no such name"),
    ),
    ("names", "hull", "cut off here: x", "routing and firewall", lambda f: _names(f, ["100.100.100.100"], "x")),
    ("names", "hull", "tsd, which answers", "nsswitch.conf", lambda f: _names(f, ["100.100.100.100"])),
    (
        "names",
        "hull",
        "chattr -i",
        "--accept-dns=false",
        lambda f: _names(f, ["192.0.2.1"], dns_set_os_config_failed="not written (chattr -i /etc/resolv.conf)"),
    ),
    ("clock", "hull", "2 hours behind", "set-ntp", _control(clock_offset_s=-7200.0)),
    ("control", "network", "DNS fails", "getent", lambda f: _offline(f, Reached("dns", "c.example: no such name"))),
    ("control", "network", "TCP fails", "HTTPS_PROXY", lambda f: _offline(f, _GONE)),
    (
        "control",
        "network",
        "TCP fails",
        "no way there",
        lambda f: _offline(f, Reached("tcp", "Network is unreachable")),
    ),
    (
        "control",
        "control",
        "HTTP fails",
        "down for now",
        lambda f: (
            _offline(f, Reached("http", "it answers 'HTTP/1.1 503 Service Unavailable' where")),
            _status(BackendState="NeedsLogin")(f),
            f.daemon.warnings.update({"no-control": {"Text": "not reached yet"}}),
        ),
    ),
    (
        "device",
        "hull",
        "renamed, or moved",
        "systemctl restart tsd",
        lambda f: (_hull(IsUp=False)(f), _hull(Missing=["the interface tsd0"])(f)),
    ),
    ("control", "network", "the proxy fails", "NO_PROXY", lambda f: _offline(f, Reached("proxy", "it answers 407"))),
    ("control", "network", "TLS fails", "inspecting CA", lambda f: _offline(f, Reached("tls", "unknown issuer"))),
    ("control", "control", "HTTP fails", "--login-server", lambda f: _offline(f, Reached("http", "it answers 404"))),
    (
        "control",
        "control",
        "upgrade",
        "Upgrade",
        lambda f: f.daemon.report.update(ControlConnected=False, ControlError="refused"),
    ),
    ("relays", "network", "home relay lab", "TCP", _relays(reached={"lab": _GONE, "far": Reached("ok")})),
    ("relays", "network", "none of 2 relays", "TCP", _relays(reached={"lab": _GONE, "far": _GONE})),
    ("udp", "network", "UDP is blocked", "41641", _relays(stun_answers=0)),
    (
        "path-mtu",
        "network",
        "MTU black hole",
        "fragmentation",
        lambda f: f.paths.append(PathFacts("x", "192.0.2.3:1", True, False)),
    ),
]


def _offline(facts: Facts, reached: Reached) -> None:
    assert facts.control is not None
    facts.control.reached = reached
    facts.daemon.report["ControlConnected"] = False


@pytest.mark.parametrize("state", ["Stopped", "NeedsLogin", "NoState"])
def test_a_device_that_is_not_in_use_is_down_by_right(state: str) -> None:
    facts = healthy()
    _status(BackendState=state)(facts)
    _hull(IsUp=False)(facts)
    assert "device" in judge(facts, CHECKS).passed


def test_no_network_is_said_once() -> None:
    facts = healthy()
    gone = Reached("tcp", "192.0.2.9:443: Network is unreachable")
    assert facts.relays is not None
    _offline(facts, gone)
    facts.relays.__dict__.update(reached={"lab": gone}, stun_answers=0)
    facts.daemon.warnings.update({"network-status": {"Text": "No network"}})
    found = judge(facts, CHECKS)
    assert {one.check for one in found.findings} == {"control", "relays"} and "udp" in found.skipped


@pytest.mark.parametrize(("check", "layer", "cause", "fix", "break_it"), FAULTS)
def test_each_fault_is_named_alone(check: str, layer: str, cause: str, fix: str, break_it: Break) -> None:
    facts = healthy()
    break_it(facts)
    verdict = judge(facts, CHECKS)
    found = [finding for finding in verdict.findings if finding.severity == FAULT]
    assert [one.check for one in found] == [check]
    assert found[0].layer == layer and cause in found[0].cause and fix in found[0].fix
    assert not verdict.is_well
    assert found[0].line().count("\n") == 0 and "Fix: " in found[0].line()


NOTES: list[tuple[str, str, Break]] = [
    ("alone", "2 daemons", lambda f: f.box.processes.append(Process(9, "tailscaled", "/x"))),
    ("versions", "tsctl is 0.1.0", _status(Version="0.2.0")),
    ("versions", "tailscaled", lambda f: f.daemon.__dict__.update(is_tsd=False)),
    ("lan-overlap", "r offers 10.9.0.0/16", lambda f: f.box.networks.append(("10.9.3.0/24", "eth1"))),
    ("cgnat", "100.100.0.0/20", lambda f: f.box.networks.append(("100.100.0.0/20", "eth1"))),
    ("nat", "hard NAT", _relays(mapping_varies=True)),
    ("relays", "the relay far", _relays(reached={"lab": Reached("ok"), "far": _GONE})),
    ("control", "the daemon itself is connected", lambda f: f.control.__dict__.update(reached=_GONE)),
    ("control", "still connecting", lambda f: f.daemon.report.update(ControlConnected=False)),
    ("routing", "no IPv6", _hull(IPv6OffBecause="disable_ipv6 is set")),
]


@pytest.mark.parametrize(("check", "cause", "change"), NOTES)
def test_what_is_worth_knowing_is_no_fault(check: str, cause: str, change: Break) -> None:
    facts = healthy()
    change(facts)
    verdict = judge(facts, CHECKS)
    assert [(one.check, one.severity) for one in verdict.findings] == [(check, NOTE)]
    assert cause in verdict.findings[0].cause and verdict.is_well


@pytest.mark.parametrize(
    ("trouble", "cause", "fix"),
    [
        (ABSENT, "not running", "systemctl start tsd"),
        (REFUSED, "has died", "journalctl"),
        (DENIED, "no permission", "sudo"),
        (SILENT, "does not answer", "restart"),
        (FOREIGN, "is not the daemon", "--socket"),
    ],
)
def test_without_a_daemon_the_reason_comes_first_and_the_rest_is_skipped(trouble: str, cause: str, fix: str) -> None:
    facts = Facts(DaemonFacts("/s", trouble), BoxFacts(has_tun=True, can_net_admin=True))
    verdict = judge(facts, CHECKS)
    assert [one.check for one in verdict.findings] == ["daemon"]
    assert cause in verdict.findings[0].cause and fix in verdict.findings[0].fix
    assert "no daemon answers" in verdict.skipped.values()


def test_a_refused_upgrade_is_told_before_the_login() -> None:
    facts = healthy()
    facts.daemon.report |= {"ControlConnected": False, "ControlError": "a proxy removed our Upgrade header"}
    facts.daemon.status["BackendState"] = "NeedsLogin"
    found = {one.check: one for one in judge(facts, CHECKS).findings}
    assert "a proxy removed our Upgrade header" in found["control"].cause and found["control"].layer == "control"


def test_a_daemon_elsewhere_is_pointed_at() -> None:
    facts = Facts(DaemonFacts("/s", ABSENT), BoxFacts(processes=[Process(5, "tsd", "/other.sock")]))
    assert judge(facts, CHECKS).findings[0].fix == "tsctl --socket=/other.sock doctor"


def test_root_without_a_device_or_right_is_told_before_any_daemon_runs() -> None:
    facts = Facts(DaemonFacts("/s", ABSENT), BoxFacts(has_tun=False, can_net_admin=False))
    assert [one.check for one in judge(facts, CHECKS).findings] == ["daemon", "device", "rights"]


def test_what_tsd_put_back_meanwhile_is_a_fault_too() -> None:
    facts = healthy()
    facts.daemon.missing_before = ["the IPv4 rule 5370"]
    found = judge(facts, CHECKS).findings
    assert [one.check for one in found] == ["routing"] and "put it back" in found[0].cause


def test_a_smaller_tunnel_needs_less() -> None:
    facts = healthy()
    facts.box.mtu_bytes["eth0"] = 1280
    facts.daemon.hull["MtuBytes"] = 1200
    assert judge(facts, CHECKS).is_well


def test_unreadable_is_not_off() -> None:
    facts = healthy()
    facts.box.sysctl.clear()
    assert judge(facts, CHECKS).is_well


def test_f10_per_interface_forwarding_is_no_fault() -> None:
    facts = healthy()
    _sysctl(ipv4__ip_forward="0", ipv4__conf__eth0__forwarding="1", ipv4__conf__tsd0__forwarding="1")(facts)
    assert judge(facts, CHECKS).is_well


def test_strict_rp_filter_with_marks_that_count_is_no_fault() -> None:
    facts = healthy()
    _sysctl(ipv4__conf__all__rp_filter="1", ipv4__conf__eth0__rp_filter="1", ipv4__conf__all__src_valid_mark="1")(facts)
    assert judge(facts, CHECKS).is_well
    facts.daemon.prefs["NetfilterMode"] = 0
    assert [one.check for one in judge(facts, CHECKS).findings] == ["rp-filter"]


def test_warnings_of_the_daemon_are_shown_once() -> None:
    facts = healthy()
    facts.daemon.warnings = {
        "warming-up": {"Text": "tsd is starting."},
        "state-store-write": {"Text": "The state could not be saved: disk full.", "Layer": "hull", "Severity": "high"},
        "ip-forwarding-off": {"Text": "does not forward", "Layer": "hull", "Severity": "medium"},
    }
    _sysctl(ipv4__ip_forward="0")(facts)
    found = judge(facts, CHECKS).findings
    assert [one.check for one in found] == ["ip-forwarding", "health state-store-write"]
    assert found[1].layer == "hull" and "disk full" in found[1].line()


def test_userspace_and_strangers_skip_with_a_reason() -> None:
    facts = healthy()
    facts.daemon.status["TUN"] = False
    assert judge(facts, CHECKS).skipped["routing"] == "userspace networking"
    facts = healthy()
    facts.daemon.report = {}
    assert judge(facts, CHECKS).skipped["routing"] == "only root may ask tsd"
    facts.daemon.is_tsd = False
    assert judge(facts, CHECKS).skipped["routing"] == "tailscaled does not tell"
    facts = healthy()
    facts.box.is_same_network = False
    assert "another network namespace" in judge(facts, CHECKS).skipped["mtu"]


def test_the_json_form() -> None:
    facts = healthy()
    facts.relays = None
    _hull(IsUp=False)(facts)
    found = as_json(judge(facts, CHECKS))
    assert found["ok"] is False and "udp" in found["skipped"] and "daemon" in found["passed"]
    assert set(found["findings"][0]) == {"check", "severity", "layer", "cause", "fix"}


def test_names_of_checks_are_unique_and_findings_are_lines() -> None:
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names))
    assert Finding("hull", "It broke.", "mend it", check="x").line() == "fault  hull     x: It broke. Fix: mend it"
    assert copy.deepcopy(healthy()) == healthy()

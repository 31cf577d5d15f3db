"""Facts of this machine from /proc, /sys and /etc. Nothing is changed; what cannot be read is left out.

`root` is another place for `/`: tests bring their own machine. Interfaces called tsd* and tailscale* are tunnels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_network
from pathlib import Path

from tsctl.doctor.facts import BoxFacts, Process

CAP_NET_ADMIN = 12
DAEMONS = ("tsd", "tailscaled")
_SOCKETS = {"tsd": "/run/tsd/tsd.sock", "tailscaled": "/var/run/tailscale/tailscaled.sock"}
_OWN = ("tsd", "tailscale", "lo")
_OUR_CHAINS, _PASSES = ("tsd-input", "tsd-forward", "ts-input", "ts-forward"), "passes"
_PER_INTERFACE = ("ipv4/conf/{}/rp_filter", "ipv4/conf/{}/src_valid_mark", "ipv4/conf/{}/forwarding")
_OWNERS = ("systemd-resolved", "NetworkManager", "resolvconf", "dhclient", "tailscale", "tsd")


def look(daemon_pid: int, root: Path = Path("/")) -> BoxFacts:
    """`daemon_pid` 0: none."""
    facts = BoxFacts(is_linux=sys.platform.startswith("linux"), is_root=os.geteuid() == 0)
    if not facts.is_linux:
        return facts
    proc = root / "proc"
    facts.is_same_network = not daemon_pid or _network_of(proc / str(daemon_pid)) in ("", _network_of(proc / "self"))
    facts.has_tun = (root / "dev/net/tun").exists()
    if daemon_pid or facts.is_root:
        facts.can_net_admin = _has_capability(proc / (str(daemon_pid) if daemon_pid else "self") / "status")
    facts.processes = daemons(proc)
    facts.mtu_bytes = interfaces(root / "sys/class/net")
    facts.sysctl = sysctls(proc / "sys/net", list(facts.mtu_bytes))
    facts.networks = [*networks_v4(_lines(proc / "net/route")), *networks_v6(_lines(proc / "net/ipv6_route"))]
    facts.default_interfaces = default_interfaces(_lines(proc / "net/route"), _lines(proc / "net/ipv6_route"))
    facts.legacy_drops = legacy_drops(proc / "net/ip_tables_names") if facts.is_root else []
    facts.nameservers, facts.resolver_owner = resolver(_lines(root / "etc/resolv.conf"))
    return facts


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _network_of(process: Path) -> str:
    try:
        return os.readlink(process / "ns/net")
    except OSError:
        return ""


def _has_capability(status: Path) -> bool | None:
    for line in _lines(status):
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> CAP_NET_ADMIN & 1)
    return None


def daemons(proc: Path) -> list[Process]:
    """tsd and tailscaled, without those that are known to live in another network; `tsd coord` left out."""
    here, found = _network_of(proc / "self"), []
    for folder in sorted((one for one in _folders(proc) if one.name.isdigit()), key=lambda one: int(one.name)):
        name = "".join(_lines(folder / "comm")[:1])
        network = _network_of(folder)
        if name not in DAEMONS or (here and network not in ("", here)):
            continue
        words = "\0".join(_lines(folder / "cmdline")).split("\0")
        if "coord" not in words[:4]:
            found.append(Process(int(folder.name), name, _socket_of(name, words), network == here))
    return found


def _folders(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:
        return


def _socket_of(name: str, words: list[str]) -> str:
    for at, word in enumerate(words):
        flag, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and flag == "socket":
            return value if equals else "".join(words[at + 1 : at + 2])
    return _SOCKETS[name]


def interfaces(folder: Path) -> dict[str, int]:
    """MTU by name."""
    found = {}
    for one in sorted(_folders(folder)):
        text = "".join(_lines(one / "mtu")[:1])
        if text.isdecimal():
            found[one.name] = int(text)
    return found


def sysctls(folder: Path, names: list[str]) -> dict[str, str]:
    """Those that the verdicts use, by their name below /proc/sys."""
    wanted = ["ipv4/ip_forward", "ipv6/conf/all/forwarding"]
    wanted += [pattern.format(name) for pattern in _PER_INTERFACE for name in ("all", *names)]
    found = {}
    for name in wanted:
        lines = _lines(folder / name)
        if lines:
            found[f"net/{name}"] = lines[0].strip()
    return found


def networks_v4(lines: list[str]) -> list[tuple[str, str]]:
    """(prefix, interface) that the host is in, from /proc/net/route: no gateway, no single address, not our tunnel."""
    found = []
    for words in (line.split() for line in lines[1:]):
        if len(words) < 8 or words[0].startswith(_OWN) or words[2] != "00000000" or words[1] == "00000000":
            continue
        address, mask = (int.from_bytes(bytes.fromhex(words[at]), "little") for at in (1, 7))
        if mask.bit_count() < 32:
            found.append((str(ip_network((address, mask.bit_count()), strict=False)), words[0]))
    return found


def networks_v6(lines: list[str]) -> list[tuple[str, str]]:
    """The same from /proc/net/ipv6_route, without single addresses, link-local and multicast."""
    found = []
    for words in (line.split() for line in lines):
        if len(words) < 10 or words[9].startswith(_OWN) or words[4] != "0" * 32:
            continue
        address, length = IPv6Address(bytes.fromhex(words[0])), int(words[1], 16)
        if 0 < length < 128 and not (address.is_link_local or address.is_multicast):
            found.append((str(ip_network((address, length), strict=False)), words[9]))
    return found


def default_interfaces(v4: list[str], v6: list[str]) -> list[str]:
    """Interfaces of default routes other than tunnels of ours."""
    found = [w[0] for w in (line.split() for line in v4[1:]) if len(w) > 7 and w[1] == w[7] == "00000000"]
    found += [w[9] for w in (line.split() for line in v6) if len(w) > 9 and w[0] == "0" * 32 and w[1] == "00"]
    return [name for name in dict.fromkeys(found) if not name.startswith(_OWN)]


def legacy_drops(names: Path) -> list[tuple[str, str]]:
    """Asked only when the tables are loaded: listing alone would load them."""
    if "filter" not in _lines(names):
        return []
    try:
        done = subprocess.run(["iptables-legacy", "-S"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return drops_in(done.stdout.splitlines())


def drops_in(lines: list[str]) -> list[tuple[str, str]]:
    """(chain, why) of `iptables -S`, where nothing before lets a tunnel through; jumps of others are not followed."""
    found = []
    for chain in ("INPUT", "FORWARD"):
        rules = [line.split()[2:] for line in lines if line.startswith(f"-A {chain} ")]
        verdicts = [one for one in map(_verdict, rules) if one]
        if verdicts and verdicts[0] != _PASSES:
            found.append((chain, verdicts[0]))
        elif not rules and f"-P {chain} DROP" in lines:
            found.append((chain, "the policy DROP"))
    return found


def _verdict(words: list[str]) -> str:
    """`_PASSES`, why it drops all of the tailnet, or "" when it is about something else."""
    at = words.index("-j") if "-j" in words[:-1] else len(words)
    match, target = words[:at], "".join(words[at + 1 : at + 2])
    asked = dict(zip(match[::2], match[1::2], strict=False))
    if target in _OUR_CHAINS or (target == "ACCEPT" and asked.get("-i", "").startswith(_OWN[:2])):
        return _PASSES
    if target not in ("DROP", "REJECT") or "!" in match:
        return ""
    if asked.keys() <= {"-s"} and _covers_tailnet(asked.get("-s", "0.0.0.0/0")):
        return f"a {target} of {asked.get('-s', 'everything')}"
    is_ours = asked.keys() == {"-i"} and asked["-i"].startswith(_OWN[:2])
    return f"a {target} of what comes in on {asked['-i']}" if is_ours else ""


def _covers_tailnet(text: str) -> bool:
    try:
        return ip_network("100.64.0.0/10").subnet_of(ip_network(text))  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return False


def resolver(lines: list[str]) -> tuple[list[str], str]:
    """(nameservers, who says in its comments that it wrote the file)."""
    servers = [words[1] for words in (line.split() for line in lines) if len(words) > 1 and words[0] == "nameserver"]
    comments = " ".join(line for line in lines if line.startswith(("#", ";")))
    return servers, next((name for name in _OWNERS if name.lower() in comments.lower()), "")

"""What somebody else flushes or edits is put back at once; a program that goes on and on is named; drops of others too.

The times are printed; they are the product's promise on an idle machine, so only generous limits are asserted.
"""

from __future__ import annotations

import os
import re
import time

import pytest

from harness.hoststate import snapshot
from harness.netlab import wait_for
from harness.routerlab import LAN_HOST, ROUTER, RouterLab
from harness.sockets import who_am_i

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

LIMIT_S = 15.0
FLUSHES = {
    "nft": ["nft flush ruleset", "nft delete table inet tsd", "nft flush chain inet tsd tsd-forward"],
    "iptables-nft": ["nft flush ruleset", "iptables-nft -F", "iptables-nft -t nat -F", "ip6tables-nft -D FORWARD 1"],
    "iptables-legacy": ["iptables-legacy -F", "iptables-legacy -t nat -F", "ip6tables-legacy -D INPUT 1"],
}
ROUTING = [
    "ip rule flush",
    "ip -6 rule del pref 5370",
    "ip route flush table 53",
    "ip -6 route flush table 53",
    "ip addr flush dev tsd0 scope global",
]


def _state(net: RouterLab) -> dict[str, list[str]]:
    """Without the order of routes, which is that of their making."""
    texts = snapshot(net.lab, net.r.namespace)
    legacy = net.lab.run(net.r.namespace, "sh", "-c", "iptables-legacy-save; ip6tables-legacy-save")
    texts["legacy"] = re.sub(r"(?m)^#.*|\[.*?\]", "", legacy)
    texts["firewall"] = re.sub(r"counter packets \d+ bytes \d+", "counter", texts["firewall"])
    return {what: sorted(text.splitlines()) for what, text in texts.items()}


def _healed_s(net: RouterLab, line: str, whole: dict[str, list[str]]) -> float:
    net.lab.run(net.r.namespace, *line.split())
    if line == "ip rule flush":  # that leaves the rule of local addresses only
        for table, priority in (("main", "32766"), ("default", "32767")):
            net.lab.run(net.r.namespace, "ip", "rule", "add", "lookup", table, "pref", priority)
    began = time.monotonic()
    wait_for(
        lambda: who_am_i(net.c.namespace, LAN_HOST[4], timeout_s=0.3) == ROUTER[4], LIMIT_S, f"traffic after {line}"
    )
    took_s = time.monotonic() - began
    wait_for(lambda: _state(net) == whole, LIMIT_S, f"everything as before {line}")
    print(f"{line}: traffic after {took_s:.2f} s, all after {time.monotonic() - began:.2f} s")
    return took_s


@pytest.mark.parametrize("backend", FLUSHES)
def test_flushed_firewalls_are_back(net: RouterLab, backend: str) -> None:
    net.r.call("set", f"--netfilter-backend={backend}")
    net.lab.run(net.r.namespace, "nft", "flush", "ruleset")  # what others left in this namespace
    wait_for(lambda: who_am_i(net.c.namespace, LAN_HOST[4], timeout_s=0.3) == ROUTER[4], 15, "traffic")
    wait_for(lambda: _quiet(net), 15, "a firewall that rests")
    whole = _state(net)
    for line in FLUSHES[backend]:
        _healed_s(net, line, whole)


def test_f03_a_chain_that_iptables_cannot_read_is_said_and_left_alone(net: RouterLab) -> None:
    """A rule of nft before our jump: nobody can tell what is in the chain, so nothing is written into it any more."""
    run, name = net.lab.run, net.r.namespace
    net.r.call("set", "--netfilter-backend=iptables-nft")
    theirs = ["rule", "ip", "filter", "INPUT", "numgen", "inc", "mod", "3", "0", "accept"]
    try:
        run(name, "nft", "add", *theirs)  # after it: our jump is still seen
        wait_for(lambda: _quiet(net), 15, "a firewall that rests")
        assert "cannot be told" not in _health(net)
        run(name, "nft", "insert", *theirs)
        wait_for(lambda: "cannot read what nft wrote into INPUT" in _health(net), 20, "what cannot be told")
        run(name, "nft", "add", "chain", "ip", "filter", "another")  # something to hear of
        time.sleep(2)
        assert run(name, "nft", "list", "chain", "ip", "filter", "INPUT").count("jump tsd-input") == 1
        assert who_am_i(net.c.namespace, LAN_HOST[4]) == ROUTER[4]
    finally:
        run(name, "nft", "flush", "chain", "ip", "filter", "INPUT")
    wait_for(lambda: "cannot be told" not in _health(net), 20, "silence")
    wait_for(lambda: "-A INPUT -m comment" in run(name, "iptables-nft-save", "-t", "filter"), 20, "our jump again")


def _quiet(net: RouterLab) -> bool:
    before = _state(net)
    time.sleep(0.5)
    return _state(net) == before


def test_flushed_routing_is_back(net: RouterLab) -> None:
    net.r.call("set", "--netfilter-backend=nft")
    wait_for(lambda: _quiet(net), 15, "a firewall that rests")
    whole = _state(net)
    for line in ROUTING:
        _healed_s(net, line, whole)


def test_a_program_that_undoes_it_again_and_again_is_named_and_gets_less_work(net: RouterLab) -> None:
    loop = "for i in $(seq 60); do nft flush ruleset; sleep 0.25; done"
    fighter = net.lab.start(net.r.namespace, ["sh", "-c", loop], net.folder / "fight.log")
    try:
        wait_for(lambda: "again and again" in _health(net), 30, "the fight in the status")
        assert "nft (process" in _health(net) and "firewall rules" in _health(net)
    finally:
        fighter.stop()
    wait_for(lambda: who_am_i(net.c.namespace, LAN_HOST[4], timeout_s=0.3) == ROUTER[4], 20, "traffic again")


def _health(net: RouterLab) -> str:
    return " ".join(net.r.status()["Health"] or [])


def test_f11_containers_that_come_and_go_cost_little(net: RouterLab) -> None:
    """Interfaces, link-local addresses and routes of other tables: no new sockets, and little CPU time."""
    assert net.r.process is not None
    stat = f"/proc/{net.r.process.pid}/stat"

    def cpu_s() -> float:
        with open(stat) as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    churn = (
        "for i in $(seq 25); do ip link add ve$i type veth peer name vp$i; ip link set ve$i up; ip link set vp$i up;"
        " for j in 1 2 3 4; do ip route replace 198.18.$i.$j dev ve$i table 200; done; ip link del ve$i; sleep .1; done"
    )
    log_bytes = net.r.log.stat().st_size
    before, began = cpu_s(), time.monotonic()
    net.lab.run(net.r.namespace, "sh", "-c", churn, timeout_s=120)
    time.sleep(1)
    spent_s, took_s = cpu_s() - before, time.monotonic() - began
    print(f"{spent_s:.2f} s of CPU time in {took_s:.1f} s")
    said = net.r.log.read_text(errors="replace")[log_bytes:]
    assert "rebind" not in said and "reason=link" not in said, said
    assert spent_s < 0.3 * took_s
    assert who_am_i(net.c.namespace, LAN_HOST[4]) == ROUTER[4]

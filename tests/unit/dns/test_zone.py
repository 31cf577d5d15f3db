"""Our own zone: names, reverse names, refusals, sizes."""

from ipaddress import ip_address

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import pytest

from tsd.dns.wire import answer
from tsd.dns.zone import Zone, magic_suffixes

HOSTS = {"n1.tn.example": (ip_address("100.64.0.1"), ip_address("fd7a:115c:a1e0::1"))}


@pytest.fixture
def zone() -> Zone:
    return Zone(HOSTS, magic_suffixes("tn.example"))


def ask(zone: Zone, name: str, rdtype: str = "A", **kw: object) -> dns.message.Message | None:
    query = dns.message.make_query(name, rdtype, **kw)  # type: ignore[arg-type]
    wire = answer(zone, query.to_wire())
    return None if wire is None else dns.message.from_wire(wire)


def test_host_has_one_address_per_family(zone: Zone) -> None:
    a, aaaa = ask(zone, "n1.tn.example."), ask(zone, "n1.tn.example.", "AAAA")
    assert a is not None and a.answer[0][0].to_text() == "100.64.0.1" and a.flags & dns.flags.AA
    assert aaaa is not None and aaaa.answer[0][0].to_text() == "fd7a:115c:a1e0::1"


def test_d15_mixed_case_is_answered_in_the_askers_case(zone: Zone) -> None:
    reply = ask(zone, "N1.tN.ExAmPlE.")
    assert reply is not None and reply.question[0].name.to_text() == "N1.tN.ExAmPlE."
    assert reply.answer[0].name.to_text() == "N1.tN.ExAmPlE."


def test_unknown_name_in_our_zone_is_nxdomain_with_soa(zone: Zone) -> None:
    reply = ask(zone, "nosuch.tn.example.")
    assert reply is not None and reply.rcode() == dns.rcode.NXDOMAIN
    assert reply.authority[0].rdtype == dns.rdatatype.SOA and reply.authority[0].name.to_text() == "tn.example."


def test_foreign_name_is_left_to_the_forwarder(zone: Zone) -> None:
    assert ask(zone, "example.org.") is None
    assert ask(zone, "8.8.8.8.in-addr.arpa.", "PTR") is None


def test_reverse(zone: Zone) -> None:
    reply = ask(zone, "1.0.64.100.in-addr.arpa.", "PTR")
    assert reply is not None and reply.answer[0][0].to_text() == "n1.tn.example."
    missing = ask(zone, "9.0.64.100.in-addr.arpa.", "PTR")
    assert missing is not None and missing.rcode() == dns.rcode.NXDOMAIN


def test_other_types_of_a_host_are_empty(zone: Zone) -> None:
    reply = ask(zone, "n1.tn.example.", "TXT")
    assert reply is not None and reply.rcode() == dns.rcode.NOERROR and not reply.answer
    soa = ask(zone, "n1.tn.example.", "SOA")
    assert soa is not None and soa.rcode() == dns.rcode.NOTIMP


def test_onion_never_leaves(zone: Zone) -> None:
    reply = ask(zone, "x.onion.")
    assert reply is not None and reply.rcode() == dns.rcode.NXDOMAIN


@pytest.mark.parametrize("wire", [b"", b"\x00" * 11, b"\x12\x34\x01\x00\x00\x01" + bytes(6), b"\xff" * 40])
def test_garbage_never_raises(zone: Zone, wire: bytes) -> None:
    reply = answer(zone, wire)
    assert reply is None or reply[:2] == wire[:2]


def test_no_magic_dns_claims_nothing() -> None:
    assert magic_suffixes("") == ()
    assert ask(Zone({}), "n1.tn.example.") is None


VIA = ip_address("fd7a:115c:a1e0:b1a:0:7:a01:203")


@pytest.mark.parametrize("name", ["10-1-2-3-via-7", "10-1-2-3-via-0x7.tn.example", "10-1-2-3-VIA-7.foo.ts.net"])
def test_4via6_names_are_computed(zone: Zone, name: str) -> None:
    reply = ask(zone, name, "AAAA")
    assert reply is not None and reply.answer[0][0].to_text() == str(VIA)
    empty = ask(zone, name, "A")
    assert empty is not None and empty.rcode() == dns.rcode.NOERROR and not empty.answer


@pytest.mark.parametrize("name", ["10-1-2-via-7", "10-1-2-3-via--7", "10-1-2-3-via-4294967296", "x-via-7", "-via-"])
def test_what_only_looks_like_4via6(zone: Zone, name: str) -> None:
    reply = ask(zone, f"{name}.tn.example.", "AAAA")
    assert reply is not None and reply.rcode() == dns.rcode.NXDOMAIN
    assert ask(zone, f"{name}.example.org.", "AAAA") is None


def test_4via6_and_old_ipv6_addresses_in_reverse() -> None:
    zone = Zone({"n1.tn.example": (ip_address("100.65.66.67"),)}, magic_suffixes("tn.example"))
    assert zone.reverse(VIA) == "10-1-2-3-via-7.tn.example"
    assert zone.reverse(ip_address("fd7a:115c:a1e0:ab12:4843:cd96:6241:4243")) == "n1.tn.example"


def test_names_below_a_host_and_zones_inside_of_zones() -> None:
    hosts = {"web.tn.example": (ip_address("100.64.0.3"),), "db.tn.example": (ip_address("100.64.0.4"),)}
    zone = Zone(hosts, ("tn.example",), {"web.tn.example"}, ("corp.tn.example",))
    assert zone.lookup("a.b.Web.tn.example") == (ip_address("100.64.0.3"),)
    assert zone.lookup("a.db.tn.example") == () and zone.owns("a.db.tn.example")
    assert not zone.owns("x.corp.tn.example") and zone.owns("corp2.tn.example")

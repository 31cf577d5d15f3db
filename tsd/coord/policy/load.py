"""Policy text to `Policy`: syntax, names, and the policy's own tests, with line and column of the first fault.

Section names are matched without regard to case (`ACLs` is common in the wild); an unknown section is an error, so
that a typing slip never silently opens or closes a network. A policy without `acls` and `grants` allows everything;
an empty list allows nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_network

from tsd.base.addr import IPPrefix, parse_number
from tsd.coord.policy import hujson
from tsd.coord.policy.compile import allows
from tsd.coord.policy.hujson import Element, PolicyError
from tsd.coord.policy.model import (
    ALL_PORTS,
    ALLOW_ALL,
    Kind,
    NodeAttr,
    Policy,
    PolicyTest,
    PortRange,
    Rule,
    Selector,
    SshRule,
    Subject,
    Target,
    UserRef,
)

MAX_POLICY_BYTES = 1 << 20

PROTOCOLS: dict[str, tuple[int, ...]] = {
    "": (),
    "*": (),
    "icmp": (1, 58),
    "igmp": (2,),
    "ipv4": (4,),
    "ip-in-ip": (4,),
    "tcp": (6,),
    "egp": (8,),
    "igp": (9,),
    "udp": (17,),
    "gre": (47,),
    "esp": (50,),
    "ah": (51,),
    "ipv6-icmp": (58,),
    "sctp": (132,),
}
_WITH_PORTS = {6, 17, 132}
_TAG = re.compile(r"tag:[A-Za-z][A-Za-z0-9-]*\Z")
_GROUP = re.compile(r"group:[A-Za-z0-9._ -]+\Z")
_AUTOGROUPS = {
    "autogroup:member": Kind.MEMBERS,
    "autogroup:members": Kind.MEMBERS,
    "autogroup:tagged": Kind.TAGGED,
    "autogroup:admin": Kind.ADMIN,
    "autogroup:owner": Kind.ADMIN,
    "autogroup:network-admin": Kind.ADMIN,
    "autogroup:it-admin": Kind.ADMIN,
    "autogroup:danger-all": Kind.ANY,
    "autogroup:self": Kind.SELF,
    "autogroup:internet": Kind.INTERNET,
}
_SECTIONS = {
    "acls",
    "grants",
    "groups",
    "hosts",
    "tagowners",
    "autoapprovers",
    "tests",
    "ssh",
    "nodeattrs",
    "randomizeclientport",
}
_IGNORED = {"sshtests", "disableipv4", "onecgnatroute", "$schema"}


def load(text: str) -> Policy:
    """Raises `PolicyError` for the first fault, a failing test included."""
    if len(text.encode()) > MAX_POLICY_BYTES:
        raise PolicyError(text, 0, f"policy is larger than {MAX_POLICY_BYTES} bytes")
    return _Loader(text).load()


class _Loader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.hosts: dict[str, IPPrefix] = {}
        self.groups: dict[str, tuple[str, ...]] = {}
        self.tag_owners: dict[str, tuple[Selector, ...]] = {}

    # Shapes

    def fail(self, at: Element, message: str) -> PolicyError:
        return PolicyError(self.text, at.offset, message)

    def members(self, at: Element, what: str, allowed: set[str] | None = None) -> dict[str, Element]:
        if not isinstance(at.value, dict):
            raise self.fail(at, f"{what} must be an object")
        for key, member in at.value.items():
            if allowed is not None and key not in allowed:
                known = ", ".join(sorted(allowed))
                raise PolicyError(self.text, member.key_offset, f"unknown key {key!r} in {what}; known: {known}")
        return at.value

    def items(self, at: Element | None, what: str) -> list[Element]:
        if at is None or at.value is None:
            return []
        if not isinstance(at.value, list):
            raise self.fail(at, f"{what} must be a list")
        return at.value

    def string(self, at: Element, what: str) -> str:
        if not isinstance(at.value, str):
            raise self.fail(at, f"{what} must be a string")
        return at.value

    def required(self, entry: Element, members: dict[str, Element], key: str, what: str) -> Element:
        if key not in members:
            raise self.fail(entry, f"{what} needs {key!r}")
        return members[key]

    # Sections

    def load(self) -> Policy:
        sections = self.sections(hujson.parse(self.text))
        self.load_names(sections)
        has_rules = "acls" in sections or "grants" in sections
        rules = [self.acl(entry) for entry in self.items(sections.get("acls"), "acls")]
        for entry in self.items(sections.get("grants"), "grants"):
            rules.extend(self.grant(entry))
        routes, exits = self.approvers(sections.get("autoapprovers"))
        attrs = [self.node_attr(entry) for entry in self.items(sections.get("nodeattrs"), "nodeAttrs")]
        port_knob = sections.get("randomizeclientport")
        if port_knob is not None and port_knob.value is True:
            attrs.append(NodeAttr((Selector(Kind.ANY),), {"randomize-client-port": []}))
        policy = Policy(
            rules=tuple(rules) if has_rules else (ALLOW_ALL,),
            groups=self.groups,
            tag_owners=self.tag_owners,
            route_approvers=routes,
            exit_approvers=exits,
            node_attrs=tuple(attrs),
            ssh=tuple(self.ssh(entry) for entry in self.items(sections.get("ssh"), "ssh")),
            has_ssh="ssh" in sections,
        )
        for entry in self.items(sections.get("tests"), "tests"):
            self.run_test(policy, entry)
        return policy

    def sections(self, root: Element) -> dict[str, Element]:
        sections: dict[str, Element] = {}
        for key, member in self.members(root, "the policy").items():
            lowered = key.lower()
            if lowered not in _SECTIONS | _IGNORED:
                raise PolicyError(self.text, member.key_offset, f"unknown section {key!r}")
            if lowered in sections:
                raise PolicyError(self.text, member.key_offset, f"section {key!r} occurs twice")
            sections[lowered] = member
        return sections

    def load_names(self, sections: dict[str, Element]) -> None:
        empty = Element({}, 0)
        for name, at in self.members(sections.get("hosts", empty), "hosts").items():
            if "@" in name or ":" in name:
                raise PolicyError(self.text, at.key_offset, f"host name {name!r} must not contain '@' or ':'")
            self.hosts[name] = self.prefix(self.string(at, "a host"), at)
        for name, at in self.members(sections.get("groups", empty), "groups").items():
            if not _GROUP.match(name):
                raise PolicyError(self.text, at.key_offset, f"group name {name!r} must look like 'group:name'")
            self.groups[name] = tuple(self.group_member(item) for item in self.items(at, "a group"))
        owners = self.members(sections.get("tagowners", empty), "tagOwners")
        for tag, at in owners.items():
            if not _TAG.match(tag):
                raise PolicyError(self.text, at.key_offset, f"tag {tag!r} must look like 'tag:name'")
            self.tag_owners[tag] = ()
        for tag, at in owners.items():
            self.tag_owners[tag] = self.people(at, "tagOwners")

    def group_member(self, at: Element) -> str:
        name = self.string(at, "a group member")
        if "@" not in name:
            raise self.fail(at, f"group member {name!r} must be a user with '@'; groups do not nest")
        return name

    def approvers(self, at: Element | None) -> tuple[dict[IPPrefix, tuple[Selector, ...]], tuple[Selector, ...]]:
        routes: dict[IPPrefix, tuple[Selector, ...]] = {}
        if at is None:
            return routes, ()
        members = self.members(at, "autoApprovers", {"routes", "exitNode"})
        for text, who in self.members(members.get("routes", Element({}, at.offset)), "routes").items():
            key = Element(text, who.key_offset)
            routes[self.prefix(text, key)] = self.people(who, "an approver list")
        exits = members.get("exitNode")
        return routes, self.people(exits, "exitNode") if exits is not None else ()

    # Names

    def prefix(self, text: str, at: Element) -> IPPrefix:
        try:
            return ip_network(text, strict=True)
        except ValueError as err:
            raise self.fail(at, f"{text!r} is not an address or a prefix without host bits ({err})") from None

    def selector(self, text: str, at: Element) -> Selector:
        if text == "*":
            return Selector(Kind.ANY)
        if text.startswith("tag:"):
            if text not in self.tag_owners:
                raise self.fail(at, f"tag {text!r} is not in tagOwners")
            return Selector(Kind.TAG, text)
        if text.startswith("group:"):
            if text not in self.groups:
                raise self.fail(at, f"group {text!r} is not in groups")
            return Selector(Kind.GROUP, text)
        if text.startswith("autogroup:"):
            if text not in _AUTOGROUPS:
                raise self.fail(at, f"{text!r} is not supported here")
            return Selector(_AUTOGROUPS[text], text)
        if "@" in text:
            return Selector(Kind.USER, text)
        if text in self.hosts:
            return Selector(Kind.PREFIX, text, self.hosts[text])
        if not re.match(r"[0-9a-fA-F.:]+(/[0-9]+)?\Z", text) or not re.search(r"[.:]", text):
            raise self.fail(at, f"{text!r} is not a user (needs '@'), tag, group, host of this policy or address")
        return Selector(Kind.PREFIX, text, self.prefix(text, at))

    def sources(self, at: Element, what: str) -> tuple[Selector, ...]:
        found = tuple(self.selector(self.string(item, what), item) for item in self.items(at, what))
        for item, selector in zip(at.value, found, strict=True):
            if selector.kind in (Kind.SELF, Kind.INTERNET):
                raise self.fail(item, f"{item.value!r} can only be a destination")
        return found

    def people(self, at: Element, what: str) -> tuple[Selector, ...]:
        found = self.sources(at, what)
        for item, selector in zip(at.value, found, strict=True):
            if selector.kind in (Kind.ANY, Kind.PREFIX):
                raise self.fail(item, f"{what} takes users, groups, tags and autogroups, not {item.value!r}")
        return found

    def ports(self, text: str, at: Element) -> tuple[PortRange, ...]:
        if text == "*":
            return (ALL_PORTS,)
        found = []
        for part in text.split(","):
            match = re.match(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*\Z", part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not first <= last <= 65535:
                raise self.fail(at, f"{part!r} is not a port or a range of ports")
            found.append(PortRange(first, last))
        return tuple(found)

    def target(self, at: Element, what: str) -> Target:
        text = self.string(at, what)
        host, colon, ports = text.rpartition(":")
        if not colon or not host:
            raise self.fail(at, f"{text!r} needs ports, as in '{text}:443' or '{text}:*'")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        return Target(self.selector(host, at), self.ports(ports, at))

    def protocol(self, at: Element | None) -> tuple[int, ...]:
        if at is None:
            return ()
        text = self.string(at, "proto").lower()
        if text in PROTOCOLS:
            return PROTOCOLS[text]
        number = parse_number(text, 255)
        if number is not None:
            return (number,)
        raise self.fail(at, f"unknown protocol {text!r}")

    # Rules

    def acl(self, entry: Element) -> Rule:
        members = self.members(entry, "an acl", {"action", "proto", "src", "dst"})
        action = self.required(entry, members, "action", "an acl")
        if action.value != "accept":
            raise self.fail(action, "action must be 'accept'; what no rule accepts is denied")
        sources = self.sources(self.required(entry, members, "src", "an acl"), "src")
        protocols = self.protocol(members.get("proto"))
        dst = self.items(self.required(entry, members, "dst", "an acl"), "dst")
        targets = tuple(self.target(item, "dst") for item in dst)
        if protocols and not _WITH_PORTS.intersection(protocols):
            for item, target in zip(dst, targets, strict=True):
                if target.ports != (ALL_PORTS,):
                    raise self.fail(item, "this protocol has no ports: write ':*'")
        return Rule(sources, targets, protocols)

    def grant(self, entry: Element) -> Iterator[Rule]:
        members = self.members(entry, "a grant", {"src", "dst", "ip", "app"})
        sources = self.sources(self.required(entry, members, "src", "a grant"), "src")
        dst = self.items(self.required(entry, members, "dst", "a grant"), "dst")
        selectors = tuple(self.selector(self.string(item, "dst"), item) for item in dst)
        if "ip" not in members and "app" not in members:
            raise self.fail(entry, "a grant needs 'ip' or 'app'")
        by_protocol: dict[tuple[int, ...], list[PortRange]] = {}
        for item in self.items(members.get("ip"), "ip"):
            protocols, ports = self.grant_ip(item)
            by_protocol.setdefault(protocols, []).extend(ports)
        for protocols, port_list in by_protocol.items():
            yield Rule(sources, tuple(Target(one, tuple(port_list)) for one in selectors), protocols)
        if "app" in members:
            app = {name: list(self.capability(at)) for name, at in self.members(members["app"], "app").items()}
            yield Rule(sources, tuple(Target(one, (ALL_PORTS,)) for one in selectors), (), app)

    def grant_ip(self, at: Element) -> tuple[tuple[int, ...], tuple[PortRange, ...]]:
        text = self.string(at, "ip")
        name, colon, ports = text.partition(":")
        if not colon:
            if text == "*" or text[:1].isdigit():
                return (), self.ports(text, at)
            return self.protocol(at), (ALL_PORTS,)
        return self.protocol(Element(name, at.offset)), self.ports(ports, at)

    def capability(self, at: Element) -> Iterable[object]:
        return [item.plain() for item in self.items(at, "a capability")]

    def node_attr(self, entry: Element) -> NodeAttr:
        members = self.members(entry, "a nodeAttr", {"target", "attr", "app"})
        targets = self.sources(self.required(entry, members, "target", "a nodeAttr"), "target")
        attributes: dict[str, list[object]] = {}
        for item in self.items(members.get("attr"), "attr"):
            attributes[self.string(item, "attr")] = []
        if "app" in members:
            for name, at in self.members(members["app"], "app").items():
                attributes[name] = list(self.capability(at))
        return NodeAttr(targets, attributes)

    def ssh(self, entry: Element) -> SshRule:
        known = {"action", "src", "dst", "users", "acceptEnv", "checkPeriod"}
        members = self.members(entry, "an ssh rule", known)
        action = self.required(entry, members, "action", "an ssh rule")
        if action.value not in ("accept", "check"):
            raise self.fail(action, "action must be 'accept' or 'check'")
        sources = self.sources(self.required(entry, members, "src", "an ssh rule"), "src")
        dst = self.items(self.required(entry, members, "dst", "an ssh rule"), "dst")
        strings: Callable[[str], tuple[str, ...]] = lambda key: tuple(  # noqa: E731
            self.string(item, key) for item in self.items(members.get(key), key)
        )
        targets = tuple(self.selector(self.string(item, "dst"), item) for item in dst)
        return SshRule(action.value == "check", sources, targets, strings("users"), strings("acceptEnv"))

    # Tests

    def run_test(self, policy: Policy, entry: Element) -> None:
        members = self.members(entry, "a test", {"src", "proto", "accept", "deny"})
        src = self.required(entry, members, "src", "a test")
        source = self.selector(self.string(src, "src"), src)
        protocols = self.protocol(members.get("proto")) or (6,)
        subjects = self.subjects(source, src)
        for key, wanted in (("accept", True), ("deny", False)):
            for item in self.items(members.get(key), key):
                target = self.target(item, key)
                self.check_reach(policy, (source, subjects), (item, target), protocols[0], wanted)

    def check_reach(
        self,
        policy: Policy,
        source: tuple[Selector, list[Subject]],
        destination: tuple[Element, Target],
        protocol: int,
        wanted: bool,
    ) -> None:
        item, target = destination
        port = target.ports[0].first
        for subject in source[1]:
            for goal in self.subjects(target.selector, item):
                if allows(policy, subject, goal, protocol, port) is not wanted:
                    verb = "is refused but must be accepted" if wanted else "is accepted but must be refused"
                    who = subject.user.login_name if subject.user else source[0].name
                    raise self.fail(item, f"test failed: {who} to {item.value} {verb}")

    def subjects(self, selector: Selector, at: Element) -> list[Subject]:
        """Stand-ins for the nodes that a test speaks of: a policy is tested before any node exists."""
        if selector.kind is Kind.USER:
            return [Subject(0, UserRef(selector.name), (), ())]
        if selector.kind is Kind.GROUP:
            return [Subject(0, UserRef(member), (), ()) for member in self.groups[selector.name]]
        if selector.kind is Kind.TAG:
            return [Subject(0, None, (selector.name,), ())]
        if selector.kind is Kind.PREFIX and selector.prefix is not None:
            return [Subject(0, None, (), (), (selector.prefix,))]
        raise self.fail(at, f"a test cannot speak of {at.value!r}: name a user, group, tag, host or address")


__all__ = ["MAX_POLICY_BYTES", "PROTOCOLS", "Policy", "PolicyError", "PolicyTest", "load"]

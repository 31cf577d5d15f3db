"""What a policy says, as values: selectors, rules, approvers, tests. Built by `load`, used by `compile`.

Spec: the policy file syntax of the field (acls, grants, groups, hosts, tagOwners, autoApprovers, nodeAttrs, ssh,
tests). There are no device postures, IP sets, `via` routing or services here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from tsd.base.addr import IPAddress, IPPrefix


class Kind(Enum):
    ANY = "*"
    USER = "user"
    GROUP = "group"
    TAG = "tag"
    PREFIX = "prefix"
    MEMBERS = "autogroup:member"
    TAGGED = "autogroup:tagged"
    SELF = "autogroup:self"
    INTERNET = "autogroup:internet"
    ADMIN = "autogroup:admin"


class Selector(NamedTuple):
    """Who or what a rule speaks of; `name` for users, groups and tags, `prefix` for addresses and hosts."""

    kind: Kind
    name: str = ""
    prefix: IPPrefix | None = None


class PortRange(NamedTuple):
    first: int
    last: int

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and self.first <= port <= self.last


ALL_PORTS = PortRange(0, 65535)


class Target(NamedTuple):
    """A destination of a rule and its ports."""

    selector: Selector
    ports: tuple[PortRange, ...]


class Rule(NamedTuple):
    """One allowance. With `app` it grants capabilities and lets no packet through."""

    sources: tuple[Selector, ...]
    targets: tuple[Target, ...]
    protocols: tuple[int, ...] = ()  # empty: TCP, UDP and ICMP
    app: dict[str, list[Any]] | None = None


class SshRule(NamedTuple):
    is_check: bool
    sources: tuple[Selector, ...]
    targets: tuple[Selector, ...]
    users: tuple[str, ...]
    accept_env: tuple[str, ...]


class PolicyTest(NamedTuple):
    """`sources` try to reach each entry; `offset` is where the test stands in the text."""

    source: Selector
    protocol: int
    accept: tuple[tuple[Target, int], ...]
    deny: tuple[tuple[Target, int], ...]


class NodeAttr(NamedTuple):
    targets: tuple[Selector, ...]
    attributes: dict[str, list[Any]]


class UserRef(NamedTuple):
    """A user as policies name one: `alice@` by name, `alice@example.com` by login name."""

    login_name: str
    name: str = ""
    is_admin: bool = False


class Subject(NamedTuple):
    """A node as policies see it; `routes` are the subnets it may serve now."""

    node_id: int
    user: UserRef | None
    tags: tuple[str, ...]
    addresses: tuple[IPAddress, ...]
    routes: tuple[IPPrefix, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    rules: tuple[Rule, ...]
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tag_owners: dict[str, tuple[Selector, ...]] = field(default_factory=dict)
    route_approvers: dict[IPPrefix, tuple[Selector, ...]] = field(default_factory=dict)
    exit_approvers: tuple[Selector, ...] = ()
    node_attrs: tuple[NodeAttr, ...] = ()
    ssh: tuple[SshRule, ...] = ()
    tests: tuple[PolicyTest, ...] = ()
    has_ssh: bool = False


ALLOW_ALL = Rule((Selector(Kind.ANY),), (Target(Selector(Kind.ANY), (ALL_PORTS,)),))
DEFAULT_POLICY = Policy((ALLOW_ALL,))

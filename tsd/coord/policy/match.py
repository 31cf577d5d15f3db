"""Whether a selector speaks of a node, and the address arithmetic that rules need."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_network

from tsd.base.addr import CGNAT, IPPrefix
from tsd.coord.policy.model import Kind, Policy, Selector, Subject, UserRef

EXIT_ROUTES: tuple[IPPrefix, IPPrefix] = (IPv4Network("0.0.0.0/0"), IPv6Network("::/0"))

_NOT_INTERNET_V4 = ("0.0.0.0/8", "10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16",
                    "224.0.0.0/4", "240.0.0.0/4")  # fmt: skip


def is_exit_route(prefix: IPPrefix) -> bool:
    return prefix.prefixlen == 0


def overlaps(first: IPPrefix, second: IPPrefix) -> bool:
    """Also for two families, which never overlap."""
    if isinstance(first, IPv4Network) and isinstance(second, IPv4Network):
        return first.overlaps(second)
    if isinstance(first, IPv6Network) and isinstance(second, IPv6Network):
        return first.overlaps(second)
    return False


def narrower(first: IPPrefix, second: IPPrefix) -> IPPrefix:
    """The intersection of two overlapping prefixes."""
    return first if first.prefixlen >= second.prefixlen else second


def _internet() -> tuple[IPPrefix, ...]:
    """What `autogroup:internet` means: global unicast without private, tailnet and multicast ranges."""
    left: list[IPv4Network] = [IPv4Network("0.0.0.0/0")]
    for hole in (*map(IPv4Network, _NOT_INTERNET_V4), CGNAT):
        kept: list[IPv4Network] = []
        for prefix in left:
            kept.extend(prefix.address_exclude(hole) if hole.subnet_of(prefix) else [prefix])
        left = kept
    return (*sorted(left), IPv6Network("2000::/3"))


INTERNET = _internet()


def user_matches(name: str, user: UserRef) -> bool:
    """`alice@` names a user of ours, `alice@example.com` a login name."""
    wanted = name.lower()
    return wanted == user.login_name.lower() or (wanted.endswith("@") and wanted[:-1] == user.name.lower())


def matches_identity(policy: Policy, selector: Selector, subject: Subject) -> bool:
    """Whether `selector` means this node by who it is; prefixes and `autogroup:self` are not looked at."""
    kind = selector.kind
    if kind is Kind.ANY:
        return True
    if kind is Kind.TAG:
        return selector.name in subject.tags
    if kind is Kind.TAGGED:
        return bool(subject.tags)
    if subject.tags or subject.user is None:
        return False
    if kind is Kind.MEMBERS:
        return True
    if kind is Kind.ADMIN:
        return subject.user.is_admin
    if kind is Kind.USER:
        return user_matches(selector.name, subject.user)
    if kind is Kind.GROUP:
        return any(user_matches(member, subject.user) for member in policy.groups.get(selector.name, ()))
    return False


def owned_prefixes(subject: Subject) -> list[IPPrefix]:
    """Addresses as single-address prefixes, then routes."""
    return [*(ip_network(address) for address in subject.addresses), *subject.routes]


def matches(policy: Policy, selector: Selector, subject: Subject) -> bool:
    """As a source, or as somebody to approve or tag: prefixes compare with the node's addresses and routes."""
    if selector.kind is Kind.PREFIX and selector.prefix is not None:
        return any(overlaps(selector.prefix, owned) for owned in owned_prefixes(subject))
    return matches_identity(policy, selector, subject)


def matches_any(policy: Policy, selectors: Iterable[Selector], subject: Subject) -> bool:
    return any(matches(policy, selector, subject) for selector in selectors)

"""SSH rules of the policy as the wire wants them: first match wins, no match denies (tailscale: tailcfg, SSHPolicy).

`check` needs a browser session that this server does not have: such a rule refuses with a text that says so.
"""

from __future__ import annotations

from tsd.coord.policy.match import matches_any
from tsd.coord.policy.model import Kind, SshRule
from tsd.coord.state.visibility import Visibility
from tsd.tailcfg.ssh import SSHAction, SSHPolicy, SSHPrincipal, SSHRule

_NO_CHECK = "This coordination server cannot ask for a check; use action accept, or ask its administrator.\r\n"


def policy_for(visibility: Visibility, node_id: int) -> SSHPolicy:
    """Rules whose destination is `node_id`."""
    policy = visibility.compiled.policy
    subject = visibility.subjects[node_id]
    rules: list[SSHRule] = []
    for rule in policy.ssh:
        is_self = any(one.kind is Kind.SELF for one in rule.targets) and not subject.tags
        if is_self or matches_any(policy, rule.targets, subject):
            principals = _principals(visibility, rule, node_id if is_self else 0)
            if principals:
                rules.append(_wire_rule(rule, principals))
    return SSHPolicy(rules=tuple(rules))


def _principals(visibility: Visibility, rule: SshRule, same_user_as: int) -> tuple[SSHPrincipal, ...]:
    if any(one.kind is Kind.ANY for one in rule.sources) and not same_user_as:
        return (SSHPrincipal(any=True),)
    policy = visibility.compiled.policy
    owner = visibility.subjects[same_user_as].user if same_user_as else None
    return tuple(
        SSHPrincipal(node_ip=str(address))
        for _node_id, subject in sorted(visibility.subjects.items())
        if matches_any(policy, rule.sources, subject)
        and (not same_user_as or (subject.user == owner and not subject.tags))
        for address in subject.addresses
    )


def _wire_rule(rule: SshRule, principals: tuple[SSHPrincipal, ...]) -> SSHRule:
    users = {name: name for name in rule.users if name not in ("autogroup:nonroot", "*")}
    if "autogroup:nonroot" in rule.users or "*" in rule.users:
        users["*"] = "="
        users.setdefault("root", "root" if "*" in rule.users else "")
    if rule.is_check:
        action = SSHAction(reject=True, message=_NO_CHECK)
    else:
        action = SSHAction(
            accept=True,
            allow_agent_forwarding=True,
            allow_local_port_forwarding=True,
            allow_remote_port_forwarding=True,
        )
    return SSHRule(principals=principals, ssh_users=users, action=action, accept_env=rule.accept_env or None)

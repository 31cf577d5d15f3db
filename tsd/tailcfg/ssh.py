"""SSH policy (tailscale: tailcfg/tailcfg.go, SSHPolicy); names are lower camel here."""

from __future__ import annotations

from tsd.tailcfg.wire import Wire, always


def camel_name(attribute: str) -> str:
    head, *rest = attribute.split("_")
    return head + "".join("IP" if word == "ip" else word.capitalize() for word in rest)


class SSHPrincipal(Wire, frozen=True, gc=False, rename=camel_name):
    node: str = ""
    node_ip: str = ""
    user_login: str = ""
    any: bool = False


class SSHRecorderFailureAction(Wire, frozen=True, gc=False):
    reject_session_with_message: str = ""
    terminate_session_with_message: str = ""
    notify_url: str = ""


class SSHAction(Wire, frozen=True, gc=False, rename=camel_name):
    """`session_duration` is in nanoseconds."""

    message: str = ""
    reject: bool = False
    accept: bool = False
    session_duration: int = 0
    allow_agent_forwarding: bool = False
    hold_and_delegate: str = ""
    allow_local_port_forwarding: bool = False
    allow_remote_port_forwarding: bool = False
    recorders: tuple[str, ...] | None = None
    on_recording_failure: SSHRecorderFailureAction | None = None


class SSHRule(Wire, frozen=True, gc=False, rename=camel_name):
    rule_expires: str | None = None
    principals: tuple[SSHPrincipal, ...] | None = always(None)
    ssh_users: dict[str, str] | None = always(None)
    action: SSHAction | None = always(None)
    accept_env: tuple[str, ...] | None = None


class SSHPolicy(Wire, frozen=True, gc=False, rename=camel_name):
    """First match wins; no match denies."""

    rules: tuple[SSHRule, ...] | None = always(None)

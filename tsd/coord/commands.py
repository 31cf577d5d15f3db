"""The administrator's subcommands of `tsd coord`: keys, nodes, users, policy."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from tsd.base.errors import ConfigError, reason_of
from tsd.coord.cli import ask, coord, json_option, one_line_errors, show, state_option, table
from tsd.coord.settings import parse_duration


@coord.group("keys")
@state_option
def keys(state: Path) -> None:
    """Auth keys: what lets nodes join without a person."""


@keys.command("create")
@state_option
@click.option("--reusable", is_flag=True, help="For any number of nodes.")
@click.option("--ephemeral", is_flag=True, help="Its nodes are deleted when they have been offline for a while.")
@click.option("--tags", default="", metavar="tag:a,tag:b", help="Its nodes get these tags and belong to no user.")
@click.option("--expiry", default="24h", show_default=True, help="How long the key works; never = for ever.")
@click.option("--user", default="", help="Owner of its nodes.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the key to this file (0600).")
@json_option
def keys_create(
    state: Path, tags: str, expiry: str, user: str, output: Path | None, as_json: bool, reusable: bool, ephemeral: bool
) -> None:
    """Make an auth key; it is shown this once."""
    with one_line_errors():
        expiry_s = None if expiry == "never" else parse_duration(expiry, "--expiry")
        wanted = [tag.strip() for tag in tags.split(",") if tag.strip()]
        made = ask(
            state, "keys.create", user=user, tags=wanted, reusable=reusable, ephemeral=ephemeral, expiry_s=expiry_s
        )
        if output is not None:
            try:
                write_secret(output, made["key"] + "\n")
            except ConfigError:
                ask(state, "keys.revoke", key=str(made["id"]))  # nobody has seen it
                raise
    if output is not None and not as_json:
        click.echo(f"auth key {made['id']} written to {output}")
    else:
        show(made, as_json, made["key"])


def write_secret(path: Path, text: str) -> None:
    """Replace the file by one that only the owner can read. Raises `ConfigError`."""
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        fresh.replace(path)
    except OSError as err:
        raise ConfigError(f"--output {path}: {err.strerror}") from None


@keys.command("list")
@state_option
@json_option
def keys_list(state: Path, as_json: bool) -> None:
    """All auth keys, without their secrets."""
    with one_line_errors():
        found = ask(state, "keys.list")
    rows = [
        [str(k["id"]), k["prefix"], k["state"], _kind(k), k["user"], str(k["uses"]), k["expiry"] or "never"]
        for k in found
    ]
    show(found, as_json, table(rows, ["ID", "PREFIX", "STATE", "KIND", "USER", "USES", "EXPIRY"]))


def _kind(key: dict[str, Any]) -> str:
    words = ["reusable" if key["reusable"] else "single-use"]
    if key["ephemeral"]:
        words.append("ephemeral")
    return ",".join([*words, *key["tags"]])


@keys.command("revoke")
@state_option
@click.argument("key")
@json_option
def keys_revoke(state: Path, key: str, as_json: bool) -> None:
    """No further node can join with KEY (its ID, or the key); nodes that joined stay."""
    with one_line_errors():
        found = ask(state, "keys.revoke", key=key)
    show(found, as_json, f"auth key {found['id']} is revoked")


@coord.group("nodes")
@state_option
def nodes(state: Path) -> None:
    """Nodes of the tailnet; NODE is an ID, a name or an address."""


@nodes.command("list")
@state_option
@json_option
def nodes_list(state: Path, as_json: bool) -> None:
    """All nodes, and logins that wait for approval."""
    with one_line_errors():
        found = ask(state, "nodes.list")
        waiting = ask(state, "nodes.pending")
    rows = [
        [str(n["id"]), n["name"], ",".join(n["tags"]) or n["user"], " ".join(n["addresses"]), _condition(n), n["os"]]
        for n in found
    ]
    text = table(rows, ["ID", "NAME", "OWNER", "ADDRESSES", "STATE", "OS"])
    for one in waiting:
        text += f"\nwaiting for approval: {one['hostname'] or '(no name)'}  {one['id']}"
    show(found, as_json, text)


def _condition(node: dict[str, Any]) -> str:
    words = ["online" if node["online"] else "offline"]
    words += [word for word in ("expired", "ephemeral") if node[word]]
    unapproved = [route for route in node["advertisedRoutes"] if route not in node["approvedRoutes"]]
    return ",".join([*words, "routes to approve"] if unapproved else words)


def _node_command(name: str, help_text: str, done: str) -> None:
    @nodes.command(name, help=help_text)
    @state_option
    @click.argument("node")
    @json_option
    def command(state: Path, node: str, as_json: bool) -> None:
        with one_line_errors():
            found = ask(state, f"nodes.{name}", node=node)
        show(found, as_json, done.format(**found))


_node_command("expire", "NODE must log in again.", "{name} is expired")
_node_command("delete", "Remove NODE from the tailnet.", "{name} is deleted")
_node_command("echo", "Ask NODE for a sign of life through its control connection.", "{node}: {answer}")


@nodes.command("rename")
@state_option
@click.argument("node")
@click.argument("name")
@json_option
def nodes_rename(state: Path, node: str, name: str, as_json: bool) -> None:
    """Give NODE another name; "" means the name of its host again."""
    with one_line_errors():
        found = ask(state, "nodes.rename", node=node, name=name)
    show(found, as_json, f"{node} is now {found['fqdn']}")


@nodes.command("approve-routes")
@state_option
@click.argument("node")
@click.argument("routes", nargs=-1)
@json_option
def nodes_approve_routes(state: Path, node: str, routes: tuple[str, ...], as_json: bool) -> None:
    """Set the routes that NODE may serve (none: take them all back)."""
    with one_line_errors():
        wanted = [part.strip() for text in routes for part in text.split(",") if part.strip()]
        found = ask(state, "nodes.approve-routes", node=node, routes=wanted)
    show(found, as_json, f"{found['name']} may serve: {', '.join(found['approvedRoutes']) or 'nothing'}")


@nodes.command("approve")
@state_option
@click.argument("auth_id")
@click.option("--user", default="", help="Owner of the node.")
@json_option
def nodes_approve(state: Path, auth_id: str, user: str, as_json: bool) -> None:
    """Let a node in that waits with an interactive login (its ID or its URL)."""
    with one_line_errors():
        found = ask(state, "nodes.approve", id=auth_id, user=user)
    show(found, as_json, f"{found['name']} has joined as {', '.join(found['addresses'])}")


@coord.group("users")
@state_option
def users(state: Path) -> None:
    """Users: made by `keys create --user` and `nodes approve --user`."""


@users.command("list")
@state_option
@json_option
def users_list(state: Path, as_json: bool) -> None:
    """All users."""
    with one_line_errors():
        found = ask(state, "users.list")
    rows = [[str(u["id"]), u["name"], u["loginName"], "admin" if u["admin"] else ""] for u in found]
    show(found, as_json, table(rows, ["ID", "NAME", "LOGIN", "ROLE"]))


@coord.group("policy")
@state_option
def policy(state: Path) -> None:
    """Who may reach whom (HuJSON)."""


@policy.command("check")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@json_option
def policy_check(file: Path, as_json: bool) -> None:
    """Check FILE, its tests included; needs no running server."""
    from tsd.coord.policyfile import read_policy

    with one_line_errors():
        _text, found = read_policy(file)
    result = {"rules": len(found.rules), "groups": len(found.groups), "tags": len(found.tag_owners)}
    show(result, as_json, f"{file} is a good policy ({len(found.rules)} rules)")


@policy.command("get")
@state_option
@json_option
def policy_get(state: Path, as_json: bool) -> None:
    """Print the policy in force."""
    with one_line_errors():
        found = ask(state, "policy.get")
    show(found, as_json, found["policy"].rstrip("\n"))


@policy.command("set")
@state_option
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@json_option
def policy_set(state: Path, file: Path, as_json: bool) -> None:
    """Store and apply the policy in FILE (- is standard input)."""
    with one_line_errors():
        if str(file) == "-":
            text = sys.stdin.read()
        else:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as err:
                raise ConfigError(f"policy {file}: {reason_of(err)}") from None
        try:
            result = ask(state, "policy.set", policy=text)
        except ConfigError as err:
            raise ConfigError(f"{file}:{err}") from None
    show(result, as_json, "the policy is in force")

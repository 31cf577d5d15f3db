"""`tsctl exit-node list` and `suggest`."""

from __future__ import annotations

from typing import Any

from tsctl import context as ctx
from tsctl.goflags import Command, Failure, Flag, Parsed
from tsctl.status import last_seen


def exit_node_command(context: ctx.Context) -> Command:
    return Command(
        "exit-node",
        "Show exit nodes",
        None,
        subcommands=(
            Command(
                "list",
                "List the exit nodes that the tailnet offers",
                lambda parsed: _list(context, parsed),
                flags=(Flag("filter", "only those of this country"),),
            ),
            Command(
                "suggest",
                "Suggest the nearest exit node",
                lambda parsed: _suggest(context, parsed),
                flags=(Flag("force-probe", "measure again first", False, is_hidden=True),),
            ),
        ),
    )


def _list(context: ctx.Context, parsed: Parsed) -> None:
    peers = [peer for peer in ctx.peers_of(context.client.status()) if peer.get("ExitNodeOption")]
    if not peers:
        raise Failure("no exit nodes found")
    country = parsed.text("filter")
    shown = [peer for peer in peers if _matches(peer, country)]
    if not shown:
        raise Failure(f"no exit nodes found for {ctx.quoted(country)}")
    rows = [["", "IP", "HOSTNAME", "COUNTRY", "CITY", "STATUS"]]
    rows += [_row(peer) for peer in _best_of_cities(shown, keeps_all=bool(country))]
    ctx.out()
    for line in ctx.table([row[1:] for row in rows], pad=5, min_width=10, pads_last=True):
        ctx.out(" " + line)
    ctx.out("\n# To use one of them: `tsctl set --exit-node=` followed by its IP or hostname.")


def _location(peer: dict[str, Any]) -> dict[str, Any]:
    found = peer.get("Location")
    return found if isinstance(found, dict) else {}


def _matches(peer: dict[str, Any], country: str) -> bool:
    place = _location(peer)
    return not country or country.lower() in (
        str(place.get("Country") or "").lower(),
        str(place.get("CountryCode") or "").lower(),
    )


def _best_of_cities(peers: list[dict[str, Any]], *, keeps_all: bool) -> list[dict[str, Any]]:
    """One per city, the one of the highest priority, unless a country was asked for."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for index, peer in enumerate(peers):
        place = _location(peer)
        city = (str(place.get("Country") or ""), str(place.get("City") or ""))
        key = city if place.get("City") and not keeps_all else ("", str(index))
        held = best.get(key)
        if held is None or int(_location(held).get("Priority") or 0) < int(place.get("Priority") or 0):
            best[key] = peer
    return sorted(
        best.values(),
        key=lambda peer: (
            str(_location(peer).get("Country") or ""),
            str(_location(peer).get("City") or ""),
            str(peer.get("DNSName") or ""),
        ),
    )


def _row(peer: dict[str, Any]) -> list[str]:
    place = _location(peer)
    address = (peer.get("TailscaleIPs") or ["-"])[0]
    name = str(peer.get("DNSName") or "").rstrip(".")
    return ["", str(address), name, place.get("Country") or "-", place.get("City") or "-", _state(peer)]


def _state(peer: dict[str, Any]) -> str:
    offline = "" if peer.get("Online") else f"offline{last_seen(peer)}"
    if peer.get("ExitNode"):
        return f"selected but {offline}" if offline else "selected"
    return offline or "-"


def _suggest(context: ctx.Context, parsed: Parsed) -> None:
    try:
        if parsed.flag("force-probe"):
            found = context.client.call("POST", "suggest-exit-node?probe=true", b"").json()
        else:
            found = context.client.get("suggest-exit-node")
    except Failure as failure:
        raise Failure(f"suggest exit node: {failure.text}") from None
    name = str((found or {}).get("Name") or "").rstrip(".")
    if not (found or {}).get("ID"):
        ctx.out("No exit node suggestion is available.")
        return
    ctx.out(f"Suggested exit node: {name}\nTo use it, run `tsctl set --exit-node={name}`.")


COMMANDS = {"exit-node": exit_node_command}

"""`tsd coord`: run the coordination server, or (subcommands) administer the one that runs.

Exit codes: 0, 1 (the server cannot be reached or failed), 2 (the input is wrong; one line says what).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from tsd.base.errors import ConfigError, TsdError
from tsd.coord.settings import (
    DEFAULT_DERP_PORT,
    DEFAULT_LISTEN,
    DEFAULT_STUN_PORT,
    Settings,
    default_state_folder,
    parse_duration,
    parse_listen,
    parse_prefixes,
    parse_resolvers,
    parse_zones,
)
from tsd.coord.state.config import SIZE_LIMIT_NODES

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("tsd.coord")

_HELP = f"""Coordination server for small tailnets: control, relay (DERP) and STUN in one process.

It is made for one machine, tests and networks of up to about {SIZE_LIMIT_NODES} nodes. For more, or for a
service that must not have a single point of failure, run headscale or use Tailscale, and point
--login-server at it.

Without a subcommand it runs the server; the subcommands administer a running one through its state folder.
"""


def run_command_line(words: Sequence[str]) -> int:
    """The exit code. click's own errors become one line, too."""
    try:
        done = coord.main(args=list(words), prog_name="tsd coord", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as err:
        err.show()
        return 2
    except click.ClickException as err:
        where = err.ctx.command_path if isinstance(err, click.UsageError) and err.ctx is not None else "tsd coord"
        text = err.format_message().rstrip(".").splitlines()
        click.echo(f"{where}: {' '.join(text)} (see {where} --help)", err=True)
        return 2
    except click.Abort:
        return 1
    return done if isinstance(done, int) else 0


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Wrong input leaves as one line and exit code 2, an unreachable or failing server with 1."""
    try:
        yield
    except ConfigError as err:
        click.echo(f"tsd coord: {err}", err=True)
        sys.exit(2)
    except TsdError as err:
        click.echo(f"tsd coord: {err}", err=True)
        sys.exit(1)


def state_option(command: F) -> F:
    """--state before or after the subcommand, TSD_COORD_STATE, or the default."""

    def remember(context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path:
        if value is not None:
            context.find_root().meta["tsd.coord.state"] = value
        chosen: Path = context.find_root().meta.get("tsd.coord.state") or default_state_folder()
        return chosen

    return click.option(
        "--state",
        type=click.Path(path_type=Path, file_okay=False),
        callback=remember,
        metavar="DIR",
        help="State folder of the server.",
    )(command)


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def ask(state: Path, command: str, **arguments: Any) -> Any:
    from tsd.coord import adminclient

    return adminclient.call(state, command, arguments)


def show(result: Any, as_json: bool, text: str) -> None:
    click.echo(json.dumps(result, indent=2) if as_json else text)


def table(rows: Sequence[Sequence[str]], heads: Sequence[str]) -> str:
    """Columns as wide as their widest cell."""
    cells = [list(heads), *[list(row) for row in rows]]
    widths = [max(len(row[index]) for row in cells) for index in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


@click.group(invoke_without_command=True, help=_HELP)
@state_option
@click.option("--listen", default=DEFAULT_LISTEN, show_default=True, metavar="ADDR:PORT", help="Control (HTTP).")
@click.option(
    "--derp-listen", default="", metavar="ADDR:PORT", help="Relay (TLS); none = no relay. Default: port 3340."
)
@click.option("--stun-listen", default="", metavar="ADDR:PORT", help="STUN (UDP); none = no STUN. Default: port 3478.")
@click.option("--url", default="", help="What clients use as --login-server, when it is not the listen address.")
@click.option("--advertise", default="", metavar="ADDRESS", help="Where clients find relay and STUN.")
@click.option("--policy", type=click.Path(path_type=Path, dir_okay=False), help="Policy file (HuJSON), watched.")
@click.option("--base-domain", default="tsd.internal", show_default=True, help="Domain of the nodes' names.")
@click.option("--prefix-v4", default="100.64.0.0/10", show_default=True, help="Addresses of nodes; none = no IPv4.")
@click.option("--prefix-v6", default="fd7a:115c:a1e0::/48", show_default=True, help="The same for IPv6.")
@click.option("--tls-cert", type=click.Path(path_type=Path, dir_okay=False), help="Serve control over TLS.")
@click.option("--tls-key", type=click.Path(path_type=Path, dir_okay=False), help="Key for --tls-cert.")
@click.option("--derp-map", type=click.Path(path_type=Path, dir_okay=False), help="More relays, as a DERP map in JSON.")
@click.option(
    "--derp-verify-clients/--no-derp-verify-clients", default=True, help="Relay only for nodes of the tailnet."
)
@click.option(
    "--node-expiry", default="0s", show_default=True, help="Key lifetime of nodes with a user; 0s = for ever."
)
@click.option(
    "--ephemeral-timeout", default="2m", show_default=True, help="Ephemeral nodes go after being offline so long."
)
@click.option(
    "--dns", multiple=True, metavar="[ZONE=]ADDRESS", help="Resolver for the nodes, or for one zone; may be repeated."
)
@click.option("--verbose", "-v", is_flag=True, help="Log more.")
@click.pass_context
def coord(context: click.Context, /, state: Path, verbose: bool, **flags: Any) -> None:
    if context.invoked_subcommand is not None:
        return
    with one_line_errors():
        settings = settings_from(state, flags)
        logging.getLogger("aiohttp.server").addFilter(_is_our_fault)
        logging.basicConfig(
            level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        run_server(settings)


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Not the garbage of port scanners, which aiohttp logs with a traceback each."""
    from aiohttp.http_exceptions import BadHttpMessage

    return record.exc_info is None or not isinstance(record.exc_info[1], BadHttpMessage)


def settings_from(state: Path, flags: dict[str, Any]) -> Settings:
    """Raises `ConfigError`."""
    listen = parse_listen(flags["listen"], "--listen", 8080)
    beside = {"--derp-listen": DEFAULT_DERP_PORT, "--stun-listen": DEFAULT_STUN_PORT}
    chosen = {}
    for flag, port in beside.items():
        text = flags[flag[2:].replace("-", "_")]
        chosen[flag] = (
            None if text == "none" else parse_listen(text, flag, port) if text else listen._replace(port=port)
        )
    v4, v6 = parse_prefixes(flags["prefix_v4"], flags["prefix_v6"])
    return Settings(
        state=state,
        listen=listen,
        derp_listen=chosen["--derp-listen"],
        stun_listen=chosen["--stun-listen"],
        url=flags["url"],
        advertise=flags["advertise"],
        policy_file=flags["policy"],
        base_domain=flags["base_domain"].strip(".").lower(),
        prefix_v4=v4,
        prefix_v6=v6,
        tls_cert=flags["tls_cert"],
        tls_key=flags["tls_key"],
        derp_map_file=flags["derp_map"],
        verify_clients=flags["derp_verify_clients"],
        node_expiry_s=parse_duration(flags["node_expiry"], "--node-expiry"),
        ephemeral_timeout_s=parse_duration(flags["ephemeral_timeout"], "--ephemeral-timeout"),
        resolvers=parse_resolvers(text for text in flags["dns"] if "=" not in text),
        split_dns=parse_zones(text for text in flags["dns"] if "=" in text),
    )


def run_server(settings: Settings) -> None:
    """Until SIGTERM or SIGINT; SIGHUP reads the policy file again."""
    import asyncio

    from tsd.transport.descriptors import lift_descriptor_limit

    lift_descriptor_limit()
    factory = None
    if os.environ.get("TSD_LOOP") != "asyncio":
        with contextlib.suppress(ImportError):
            import uvloop

            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(settings))


async def serve(settings: Settings) -> None:
    import asyncio

    from tsd.coord.admin import AdminServer
    from tsd.coord.server import CoordServer

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = CoordServer(settings)
    await server.start()
    admin = AdminServer(server)
    try:
        await admin.start()
        loop.add_signal_handler(signal.SIGHUP, server.reload_policy)
        click.echo(f"tsd coord is ready: clients use --login-server={server.url}")
        click.echo(f"  relay {server.derp_address or 'none'} (TLS), STUN {server.stun_address or 'none'}")
        click.echo(f"  next: tsd coord keys create --state={settings.state}")
        await stop.wait()
    finally:
        await admin.close()
        await server.close()


@coord.command("status")
@state_option
@json_option
def status(state: Path, as_json: bool) -> None:
    """Addresses, number of nodes, size limit."""
    with one_line_errors():
        found = ask(state, "status")
    show(found, as_json, "\n".join(f"{name}: {value}" for name, value in found.items()))


# Importing registers the groups.
from tsd.coord import commands as _commands  # noqa: E402, F401

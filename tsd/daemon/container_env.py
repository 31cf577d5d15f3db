"""What the environment of a container says: the variables of the field's images, turned into flags of tsd and tsctl.

tailscale: cmd/containerboot/settings.go. Precedence: the extra arguments are the last word, so a setting that is in a
variable and in TS_EXTRA_ARGS counts as the arguments have it, which is told. What tsd cannot do is refused by name.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tsctl.context import Context
from tsctl.goflags import DURATION, HelpWanted, UsageError, parse
from tsctl.prefflags import SET_SETTINGS
from tsctl.up import COMMANDS as UP_COMMANDS
from tsd.base.errors import ConfigError
from tsd.daemon import flags as daemon_flags
from tsd.localapi.schema import parse_bool, parse_duration

SECRETS = ("TS_AUTHKEY", "TS_AUTH_KEY", "TS_CLIENT_SECRET", "TS_ID_TOKEN")
REQUIRE_DURABLE = "TSD_REQUIRE_DURABLE_STATE"
_OAUTH = ("TS_CLIENT_ID", "TS_CLIENT_SECRET", "TS_ID_TOKEN", "TS_AUDIENCE")
_REFUSED = {
    **dict.fromkeys(_OAUTH, "OAuth clients are not supported; put an auth key into TS_AUTHKEY"),
    "TS_KUBE_SECRET": "a Kubernetes secret cannot hold the state; mount a volume and name it in TS_STATE_DIR",
    "TS_SERVE_CONFIG": "tsd serves nothing to the tailnet yet; leave the variable out",
    **dict.fromkeys(
        ("TS_DEST_IP", "TS_EXPERIMENTAL_DEST_DNS_NAME", "TS_TAILNET_TARGET_IP", "TS_TAILNET_TARGET_FQDN"),
        "the container cannot be a proxy for another address; use --advertise-routes, or the SOCKS5 server",
    ),
    "TS_EXPERIMENTAL_VERSIONED_CONFIG_DIR": "name the file with TS_TAILSCALED_EXTRA_ARGS=--config=FILE",
}
_LISTEN = "[::]:9002"


@dataclass(frozen=True, slots=True)
class Boot:
    """What to run. `up_flags` are for a login, `set_flags` for a node that is logged in."""

    daemon_flags: tuple[str, ...]
    up_flags: tuple[str, ...]
    set_flags: tuple[str, ...]
    auth_key: str
    socket: str
    is_auth_once: bool
    timeout_s: float
    listen: str
    """Where /healthz and /metrics answer; "" for nowhere."""
    has_health: bool
    has_metrics: bool
    notes: tuple[str, ...]


class _Env:
    """The variables; an empty one is as good as none, but where its emptiness is a value."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.notes: list[str] = []
        self._environ = {name: self._unquoted(name, value) for name, value in environ.items()}

    def _unquoted(self, name: str, value: str) -> str:
        """In a list of a compose file, quotes around a value are part of it, which nobody wants."""
        mark = value[:1]
        if (
            not name.startswith("TS")
            or len(value) < 2
            or mark not in ("'", '"')
            or value.find(mark, 1) != len(value) - 1
        ):
            return value
        self.notes.append(f"{name}: the quotes around its value are left out")
        return value[1:-1]

    def given(self, name: str) -> str | None:
        return self._environ.get(name)

    def text(self, name: str, default: str = "") -> str:
        return self._environ.get(name) or default

    def switch(self, name: str, default: bool) -> bool:
        text = self.text(name)
        value = parse_bool(text) if text else default
        if value is None:
            raise ConfigError(f"{name}={text}: want true or false")
        return value

    def words(self, name: str) -> list[str]:
        try:
            return shlex.split(self.text(name))
        except ValueError as err:
            raise ConfigError(f"{name}={self.text(name)}: {err}") from None


def read(environ: Mapping[str, str]) -> Boot:
    """Raises `ConfigError` naming the variable."""
    env = _Env(environ)
    key = _auth_key(env)
    for name, why in _REFUSED.items():
        if env.text(name):
            raise ConfigError(f"{name}: {why}")
    settings = _settings(env)
    key = settings.pop("auth-key", "") or key
    timeout_s = parse_duration(env.text("TS_BOOT_TIMEOUT", "60s"))
    if timeout_s is None or timeout_s <= 0:
        raise ConfigError(f"TS_BOOT_TIMEOUT={env.text('TS_BOOT_TIMEOUT')}: want a duration such as 60s")
    can_set = {setting.name for setting in SET_SETTINGS}
    has_health, has_metrics = env.switch("TS_ENABLE_HEALTH_CHECK", False), env.switch("TS_ENABLE_METRICS", False)
    socket = env.text("TS_SOCKET", "/tmp/tailscaled.sock")
    return Boot(
        daemon_flags=_daemon_flags(env, socket),
        up_flags=tuple(f"--{name}={value}" for name, value in settings.items()),
        set_flags=tuple(f"--{name}={value}" for name, value in settings.items() if name in can_set),
        auth_key=key,
        socket=socket,
        is_auth_once=env.switch("TS_AUTH_ONCE", False),
        timeout_s=timeout_s,
        listen=_listen(env) if has_health or has_metrics else "",
        has_health=has_health,
        has_metrics=has_metrics,
        notes=tuple(env.notes),
    )


def _auth_key(env: _Env) -> str:
    first, second = env.text("TS_AUTHKEY"), env.text("TS_AUTH_KEY")
    if first and second and first != second:
        env.notes.append("TS_AUTHKEY and TS_AUTH_KEY differ; TS_AUTHKEY is used")
    key = first or second
    both = next((name for name in _OAUTH if env.text(name)), "") if key else ""
    if both:
        raise ConfigError(f"TS_AUTHKEY and {both} are both set; keep TS_AUTHKEY")
    return key


def _settings(env: _Env) -> dict[str, str]:
    """Flags of `tsctl up` by name."""
    found = {"accept-dns": "true" if env.switch("TS_ACCEPT_DNS", False) else "false"}
    if env.text("TS_HOSTNAME"):
        found["hostname"] = env.text("TS_HOSTNAME")
    routes = env.given("TS_ROUTES")
    if routes is not None:
        found["advertise-routes"] = routes
    from_env = set(found) - (set() if env.text("TS_ACCEPT_DNS") else {"accept-dns"})
    _parsed([f"--{name}={value}" for name, value in found.items()], "TS_HOSTNAME, TS_ROUTES")
    for name, value in _parsed(env.words("TS_EXTRA_ARGS"), "TS_EXTRA_ARGS").items():
        if name in from_env and found[name] != value:
            env.notes.append(f"--{name} of TS_EXTRA_ARGS counts, not the variable that says otherwise")
        found[name] = value
    return found


def _parsed(words: Sequence[str], where: str) -> dict[str, str]:
    command = UP_COMMANDS["up"](Context("", ()))
    try:
        parsed = parse(command.flags, words)
    except (UsageError, HelpWanted) as err:
        raise ConfigError(f"{where}: {getattr(err, 'text', '') or '--help is not a setting'}") from None
    if parsed.args:
        raise ConfigError(f"{where}: {parsed.args[0]!r} is not a flag; quote a value that has blanks in it")
    kinds = {flag.name: flag.kind for flag in command.flags}
    return {name: _text(parsed.values[name], kinds[name]) for name in parsed.mentioned}


def _text(value: bool | str | int | float, kind: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value}s" if kind == DURATION else str(value)


def _daemon_flags(env: _Env, socket: str) -> tuple[str, ...]:
    is_userspace = env.switch("TS_USERSPACE", True)
    flags = [f"--socket={socket}", f"--tun={'' if is_userspace else 'tsd0,'}{daemon_flags.USERSPACE_TUN}"]
    flags += _state_flags(env)
    for name, flag in (
        ("TS_SOCKS5_SERVER", "socks5-server"),
        ("TS_OUTBOUND_HTTP_PROXY_LISTEN", "outbound-http-proxy-listen"),
        ("TS_DEBUG_ADDR_PORT", "debug"),
    ):
        if env.text(name):
            flags.append(f"--{flag}={env.text(name)}")
    flags += env.words("TS_TAILSCALED_EXTRA_ARGS")
    try:
        daemon_flags.parse(flags, {})
    except (daemon_flags.HelpWanted, daemon_flags.VersionWanted):
        raise ConfigError("TS_TAILSCALED_EXTRA_ARGS: --help and --version run nothing") from None
    except ConfigError as err:
        raise ConfigError(f"TS_TAILSCALED_EXTRA_ARGS or the variable of a listener: {err}") from None
    return tuple(flags)


def _state_flags(env: _Env) -> list[str]:
    folder = env.text("TS_STATE_DIR")
    must_last = env.switch(REQUIRE_DURABLE, False)
    if not folder:
        if must_last:
            raise ConfigError(f"{REQUIRE_DURABLE} is set, but TS_STATE_DIR is not: mount a volume and name it there")
        env.notes.append("no TS_STATE_DIR: the state is kept in memory, and each start is a new, ephemeral node")
        return [f"--state={daemon_flags.MEMORY_STATE}"]
    if _goes_with_the_container(Path(folder)):
        text = f"TS_STATE_DIR={folder} is not on a volume: the node is lost, and made anew, with the container"
        if must_last:
            raise ConfigError(f"{text}; mount one there ({REQUIRE_DURABLE} is set)")
        env.notes.append(f"{text}; mount one there")
    theirs = Path(folder) / "tailscaled.state"
    if theirs.exists() and not (Path(folder) / "tsd.state").exists():
        return [f"--statedir={folder}", f"--state={theirs}"]
    return [f"--statedir={folder}"]


def _goes_with_the_container(folder: Path, mounts: str = "/proc/self/mounts") -> bool:
    """The folder is on the container's own (overlay) root."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        if os.stat(there).st_dev != os.stat("/").st_dev:
            return False
        with open(mounts, encoding="utf-8", errors="replace") as file:
            kinds = [line.split()[2] for line in file if line.split()[1:2] == ["/"]]
    except (OSError, IndexError):
        return False
    return bool(kinds) and kinds[-1] in ("overlay", "aufs", "fuse-overlayfs", "fuse.fuse-overlayfs")


def _listen(env: _Env) -> str:
    text = env.text("TS_HEALTHCHECK_ADDR_PORT") or env.text("TS_LOCAL_ADDR_PORT", _LISTEN)
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"TS_LOCAL_ADDR_PORT={text}: want [address]:port, such as {_LISTEN}")
    return f"{host}:{port}"

"""The daemon's settings: flags, environment and configuration file, read once and frozen.

tailscale: cmd/tailscaled/tailscaled.go (flags and defaults). Flags are Go's: one dash or two, `-x=v` or `-x v`,
switches alone or `=false`. Prefs (what the user wants, stored) are not settings; see tsd.engine.account.prefs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tsd.base.addr import parse_number
from tsd.base.errors import ConfigError
from tsd.daemon import compat as naming
from tsd.daemon.config import ConfigFile, load_config

MEMORY_STATE = "mem:"
USERSPACE_TUN = "userspace-networking"
LEAST_MTU_BYTES, MTU_BYTES, MOST_MTU_BYTES = 576, 1280, 9000
"""1280 is the smallest that IPv6 allows; nearly every path can carry it inside WireGuard and IPv6."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that is decided before the first socket is opened."""

    names: naming.Names = naming.OURS
    is_compat: bool = False
    tun: str = USERSPACE_TUN
    """Comma list, tried in order; `userspace-networking` needs no device and no root."""
    state: str = MEMORY_STATE
    """A file, or `mem:` (the node is ephemeral then)."""
    state_dir: Path | None = None
    """Folder for what is kept beside the state; None when the state is in memory and no --statedir was given."""
    socket: str = ""
    port: int = 0
    """UDP port; 0 = 41641 if it is free, else any."""
    mtu_bytes: int = MTU_BYTES
    """Of the network device, and of the netstack."""
    socks5_server: str = ""
    http_proxy: str = ""
    verbose: int = 0
    debug: str = ""
    config: ConfigFile | None = None
    config_spec: str = ""
    """As given to --config, for reading it again."""
    uploads_logs: bool = False
    log_target: str = ""
    """Where logs go besides stderr; only ever set by TS_LOG_TARGET."""
    logs_dir: str = ""
    is_cleanup: bool = False
    parent_death_fd: int = -1
    loop: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    """The environment at the start, for knobs: read it through `knob`."""

    @property
    def is_ephemeral(self) -> bool:
        return self.state.startswith(MEMORY_STATE)

    @property
    def undo_folder(self) -> Path:
        """Where the hull keeps what must be undone after a crash."""
        return self.state_dir if self.state_dir is not None else Path(self.socket or ".").absolute().parent

    def knob(self, name: str) -> str:
        """A TS_* or TSD_* variable; "" when it is not set."""
        return self.env.get(name, "")

    def knob_on(self, name: str, default: bool = False) -> bool:
        """A boolean knob as Go reads it: 1, t, true, 0, f, false."""
        text = self.env.get(name, "").lower()
        return default if text == "" else text in ("1", "t", "true")


class VersionWanted(Exception):
    """--version was given."""


class HelpWanted(Exception):
    """-h was given; the text is the help."""


@dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    help: str
    is_switch: bool = False


_FLAGS = (
    _Flag("tun", f"tunnel device to make, or {USERSPACE_TUN}; a comma list is tried in order"),
    _Flag("state", "state file, or mem: to keep nothing (the node is ephemeral then)"),
    _Flag("statedir", "folder for the state file, the last netmap, and what a crash would leave to undo"),
    _Flag("socket", "path of the LocalAPI's Unix socket"),
    _Flag("port", "UDP port for WireGuard; 0 = 41641 if free, else any"),
    _Flag("mtu", f"largest packet in the tunnel, {LEAST_MTU_BYTES} to {MOST_MTU_BYTES}; no IPv6 below {MTU_BYTES}"),
    _Flag("socks5-server", "[address]:port to serve SOCKS5 on"),
    _Flag("outbound-http-proxy-listen", "[address]:port to serve an HTTP proxy on; may equal --socks5-server"),
    _Flag("verbose", "0 = changes users see, 1 = details, 2 = every packet"),
    _Flag("debug", "[address]:port for the debug server (metrics)"),
    _Flag("config", "configuration file (HuJSON, version alpha0); optional:PATH may be missing"),
    _Flag("encrypt-state", "accepted; true is refused (no TPM support)", True),
    _Flag("hardware-attestation", "accepted; true is refused (no TPM support)", True),
    _Flag("no-logs-no-support", "never upload logs, whatever the environment says", True),
    _Flag("cleanup", "undo what a killed daemon left behind, then exit", True),
    _Flag("version", "print the version and exit", True),
    _Flag("syslog", "accepted; logs go to stderr", True),
    _Flag("bird-socket", "accepted, without effect"),
    _Flag("syspolicy-file", "accepted, without effect"),
)
_BY_NAME = {flag.name: flag for flag in _FLAGS}
_TRUE, _FALSE = {"1", "t", "true"}, {"0", "f", "false"}


def parse(argv: Sequence[str], env: Mapping[str, str] | None = None, *, compat: bool = False) -> Settings:
    """Settings from `argv` (without the program) and the environment.

    Raises `ConfigError` (one line, exit 2), `VersionWanted`, `HelpWanted`.
    """
    environment = dict(os.environ if env is None else env)
    names = naming.names(compat)
    given = split_flags(argv, names.program)
    if _switch(given, "version"):
        raise VersionWanted
    for name in ("encrypt-state", "hardware-attestation"):
        if _switch(given, name):
            raise ConfigError(f"--{name} is not supported: tsd has no TPM support; leave the flag out")
    state, state_dir = _state_paths(given, environment, names)
    uploads = not (_switch(given, "no-logs-no-support") or environment.get("TS_NO_LOGS_NO_SUPPORT", "") in _TRUE)
    log_target = environment.get("TS_LOG_TARGET", "")
    return Settings(
        names=names,
        is_compat=compat,
        tun=given.get("tun") or _default_tun(names),
        state=state,
        state_dir=state_dir,
        socket=given.get("socket") or _default_socket(environment, names, state_dir),
        port=_port(given.get("port") or environment.get("PORT") or "0"),
        mtu_bytes=_mtu(given.get("mtu") or environment.get("TS_DEBUG_MTU") or str(MTU_BYTES)),
        socks5_server=_listen(given, "socks5-server"),
        http_proxy=_listen(given, "outbound-http-proxy-listen"),
        verbose=_number("verbose", given.get("verbose") or environment.get("TS_LOG_VERBOSITY") or "0"),
        debug=_listen(given, "debug"),
        config=load_config(given["config"]) if given.get("config") else None,
        config_spec=given.get("config", ""),
        uploads_logs=uploads and bool(log_target),
        log_target=log_target if uploads else "",
        logs_dir=environment.get("TS_LOGS_DIR", ""),
        is_cleanup=_switch(given, "cleanup"),
        parent_death_fd=_parent_death_fd(environment.get("TS_PARENT_DEATH_FD", "")),
        loop=environment.get("TSD_LOOP", ""),
        env=environment,
    )


def split_flags(argv: Sequence[str], program: str) -> dict[str, str]:
    """Go's flag syntax; the last of several wins. Raises `ConfigError`, `HelpWanted`."""
    given: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-":
            raise ConfigError(f"{program} takes flags only, no arguments: {word!r} (see {program} --help)")
        if word == "--":
            if words:
                raise ConfigError(f"{program} takes flags only, no arguments: {words[0]!r} (see {program} --help)")
            break
        name, has_value, value = word.lstrip("-").partition("=")
        if name in ("h", "help"):
            raise HelpWanted(usage(program))
        flag = _BY_NAME.get(name)
        if flag is None:
            raise ConfigError(f"flag provided but not defined: -{name} (see {program} --help)")
        if not has_value and flag.is_switch:
            value = "true"
        elif not has_value:
            if not words:
                raise ConfigError(f"flag needs an argument: -{name}")
            value = words.pop(0)
        given[name] = value
    return given


def usage(program: str) -> str:
    width = max(len(flag.name) for flag in _FLAGS) + 4
    lines = [
        f"usage: {program} [flags]",
        f"       {program} coord …    the embedded coordination server",
        f"       {program} container  in a container: tsd, and a login as TS_AUTHKEY and other variables say",
        "",
        "flags:",
    ]
    lines += [f"  {'--' + flag.name:<{width}}{flag.help}" for flag in _FLAGS]
    return "\n".join(lines)


def _switch(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false").lower()
    if text not in _TRUE | _FALSE:
        raise ConfigError(f"invalid boolean value {text!r} for -{name}: want true or false")
    return text in _TRUE


def _number(name: str, text: str) -> int:
    number = parse_number(text, 10**9)
    if number is None:
        raise ConfigError(f"invalid value {text[:100]!r} for -{name}: want a whole number")
    return number


def _port(text: str) -> int:
    port = _number("port", text)
    if port > 65535:
        raise ConfigError(f"invalid value {text!r} for -port: want 0 to 65535")
    return port


def _mtu(text: str) -> int:
    mtu_bytes = _number("mtu", text)
    if not LEAST_MTU_BYTES <= mtu_bytes <= MOST_MTU_BYTES:
        raise ConfigError(f"invalid value {text!r} for -mtu: want {LEAST_MTU_BYTES} to {MOST_MTU_BYTES}")
    return mtu_bytes


def _listen(given: Mapping[str, str], name: str) -> str:
    text = given.get(name, "")
    port = text.rpartition(":")[2]
    if text and (":" not in text or parse_number(port, 65535) is None):
        raise ConfigError(f"invalid value {text!r} for -{name}: want [address]:port, such as localhost:1055")
    return text


def _parent_death_fd(text: str) -> int:
    number = parse_number(text, 1 << 20)
    return number if number is not None and number >= 3 else -1


def _default_tun(names: naming.Names, is_root: Callable[[], bool] = lambda: os.geteuid() == 0) -> str:
    """Root gets a device where one can be made (not in every container)."""
    return f"{names.tun},{USERSPACE_TUN}" if is_root() else USERSPACE_TUN


def _state_paths(given: Mapping[str, str], env: Mapping[str, str], names: naming.Names) -> tuple[str, Path | None]:
    state, folder = given.get("state", ""), given.get("statedir", "")
    if state.startswith(MEMORY_STATE):
        return state, Path(folder) if folder else None
    if state:
        return state, Path(folder) if folder else Path(state).absolute().parent
    chosen = Path(folder) if folder else _default_folder(env, names)
    if chosen is None:
        print(
            f"{names.program}: no home folder and no --statedir: the state is kept in memory and lost at exit",
            file=sys.stderr,
        )
        return MEMORY_STATE, None
    return str(chosen / names.state_file), chosen


def _default_folder(env: Mapping[str, str], names: naming.Names) -> Path | None:
    """systemd's folder, the system's for root, else one of this user's."""
    if env.get("STATE_DIRECTORY"):
        return Path(env["STATE_DIRECTORY"].split(":")[0])
    if os.geteuid() == 0:
        return Path(names.system_state_folder)
    if env.get("XDG_DATA_HOME"):
        return Path(env["XDG_DATA_HOME"]) / names.user_folder
    home = os.path.expanduser("~")
    if not os.path.isabs(home) or home == "/" or not os.access(home, os.W_OK):
        return None
    return Path(home) / ".local" / "share" / names.user_folder


def _default_socket(env: Mapping[str, str], names: naming.Names, state_dir: Path | None) -> str:
    if env.get("TSD_SOCKET"):
        return env["TSD_SOCKET"]
    if os.geteuid() == 0:
        return names.system_socket
    if env.get("XDG_RUNTIME_DIR"):
        return str(Path(env["XDG_RUNTIME_DIR"]) / names.user_folder / names.socket_file)
    return str((state_dir if state_dir is not None else Path.cwd()) / names.socket_file)

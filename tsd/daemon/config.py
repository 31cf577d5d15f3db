"""The file given to `--config`: HuJSON of version alpha0, turned into one masked edit of the prefs.

tailscale: ipn/conf.go. Serve configuration and static endpoints are carried, not judged. Keys that we do not know are
refused, because a setting that is silently ignored is worse than one that is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_interface
from pathlib import Path
from typing import Any

from tsd.base.authkey import read_auth_key
from tsd.base.errors import ConfigError

VERSION = "alpha0"
_NETFILTER_MODES = {"off": 0, "nodivert": 1, "on": 2}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a configuration file says. `masked_prefs` is Go's MaskedPrefs, ready for `edit`."""

    path: str
    is_locked: bool = True
    masked_prefs: Mapping[str, Any] = field(default_factory=dict)
    auth_key: str = ""
    """The key itself; `file:` has been read."""
    static_endpoints: tuple[str, ...] = ()
    serve_config: Any = None


def load_config(spec: str) -> ConfigFile | None:
    """`spec` is a path, or `optional:PATH`, which may be missing (None). Raises `ConfigError`."""
    path = spec.removeprefix("optional:")
    if path.startswith("vm:"):
        raise ConfigError(f"--config={spec}: reading from the virtual machine's user data is not supported")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if path != spec:
            return None
        raise ConfigError(f"--config={spec}: no such file") from None
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"--config={spec}: {getattr(err, 'strerror', None) or err}") from None
    return parse_config(text, path)


def parse_config(text: str, path: str) -> ConfigFile:
    """Raises `ConfigError` naming the file and the key."""
    if not text.strip():
        raise ConfigError(f'{path}: is empty; write at least {{"Version": "{VERSION}"}}')
    try:
        raw = json.loads(blank_comments(text))
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{path}: {err}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: want a JSON object")
    values = {key.lower(): value for key, value in raw.items()}
    spelled = {key.lower(): key for key in raw}
    version = values.pop("version", None)
    if version is None:
        raise ConfigError(f'{path}: "Version" is missing; write "Version": "{VERSION}"')
    if version != VERSION:
        raise ConfigError(f'{path}: "Version" is {version!r}; only "{VERSION}" is known')
    masked = _masked(values, spelled, path)
    try:
        auth_key = _string(values.pop("authkey", None) or "")
        static_endpoints = _strings(values.pop("staticendpoints", None) or [])
    except TypeError as err:
        raise ConfigError(f"{path}: AuthKey or StaticEndpoints: {err}") from None
    is_locked = _switch(values, "locked", spelled, path)
    config = ConfigFile(
        path=path,
        is_locked=is_locked is not False,
        masked_prefs=masked,
        auth_key=read_auth_key(auth_key) if auth_key else "",
        static_endpoints=tuple(static_endpoints),
        serve_config=values.pop("serveconfigtemp", None),
    )
    if values:
        raise ConfigError(f"{path}: unknown key {spelled[sorted(values)[0]]!r}")
    return config


def blank_comments(text: str) -> str:
    """HuJSON as JSON of the same length: comments and trailing commas become blanks, so error positions stay right."""
    out = list(text)
    at, last_comma = 0, -1
    while at < len(text):
        if text[at] == '"':
            at, last_comma = _after_string(text, at), -1
            continue
        end = _after_comment(text, at)
        if end > at:
            out[at:end] = [character if character == "\n" else " " for character in text[at:end]]
            at = end
            continue
        if text[at] in "]}" and last_comma >= 0:
            out[last_comma] = " "
        if text[at] == ",":
            last_comma = at
        elif not text[at].isspace():
            last_comma = -1
        at += 1
    return "".join(out)


def _after_string(text: str, at: int) -> int:
    at += 1
    while at < len(text) and text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _after_comment(text: str, at: int) -> int:
    """End of the comment that starts at `at`; `at` itself when none does."""
    if text.startswith("//", at):
        end = text.find("\n", at)
        return len(text) if end < 0 else end
    if text.startswith("/*", at):
        end = text.find("*/", at + 2)
        return len(text) if end < 0 else end + 2
    return at


def _masked(values: dict[str, Any], spelled: dict[str, str], path: str) -> dict[str, Any]:
    enabled = _switch(values, "enabled", spelled, path)
    masked: dict[str, Any] = {"WantRunning": enabled is not False, "WantRunningSet": True}
    if values.get("authkey"):
        masked |= {"LoggedOut": False, "LoggedOutSet": True}
    for key, (pref, convert) in _PREFS.items():
        value = values.pop(key, None)
        if value is not None:
            try:
                masked |= {pref: convert(value), f"{pref}Set": True}
            except (ValueError, TypeError) as err:
                raise ConfigError(f"{path}: {spelled[key]}: {err}") from None
    _exit_node(values, spelled, masked, path)
    if _switch(values, "advertiseexitnode", spelled, path):
        masked["AdvertiseRoutes"] = [*masked.get("AdvertiseRoutes", []), "0.0.0.0/0", "::/0"]
        masked["AdvertiseRoutesSet"] = True
    if masked.get("AutoUpdateSet"):
        masked["AutoUpdateSet"] = {"CheckSet": True, "ApplySet": True}
    # The file is the whole truth about these, also when they are absent.
    for pref in ("AdvertiseServices", "RelayServerPort", "RelayServerStaticEndpoints"):
        masked.setdefault(pref, None)
        masked[f"{pref}Set"] = True
    return masked


def _switch(values: dict[str, Any], key: str, spelled: dict[str, str], path: str) -> bool | None:
    """None: not said."""
    value = values.pop(key, None)
    if value is None or isinstance(value, bool):
        return value
    raise ConfigError(f"{path}: {spelled[key]}: want true or false, not {value!r}")


def _exit_node(values: dict[str, Any], spelled: dict[str, str], masked: dict[str, Any], path: str) -> None:
    node = values.pop("exitnode", None)
    if node is None:
        return
    if not isinstance(node, str):
        raise ConfigError(f"{path}: {spelled['exitnode']}: want a string, not {node!r}")
    try:
        masked |= {"ExitNodeIP": str(ip_address(node)), "ExitNodeIPSet": True}
    except ValueError:
        masked |= {"ExitNodeID": node, "ExitNodeIDSet": True}


def _same(value: Any) -> Any:
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("want true or false")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("want a string")
    return value


def _strings(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise TypeError("want a list")
    return [_string(item) for item in value]


def _routes(value: Any) -> list[str]:
    for text in _strings(value):
        interface = ip_interface(text)
        if interface.ip != interface.network.network_address:
            raise ValueError(f"route {text} has bits set beyond its prefix; {interface.network} is meant")
    return list(value)


def _netfilter_mode(value: Any) -> int:
    if not isinstance(value, str) or value not in _NETFILTER_MODES:
        raise ValueError(f"{value!r} is none of on, nodivert, off")
    return _NETFILTER_MODES[value]


_PREFS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "serverurl": ("ControlURL", _string),
    "operatoruser": ("OperatorUser", _string),
    "hostname": ("Hostname", _string),
    "acceptdns": ("CorpDNS", _boolean),
    "acceptroutes": ("RouteAll", _boolean),
    "allowlanwhileusingexitnode": ("ExitNodeAllowLANAccess", _boolean),
    "advertiseroutes": ("AdvertiseRoutes", _routes),
    "disablesnat": ("NoSNAT", _boolean),
    "advertiseservices": ("AdvertiseServices", _same),
    "appconnector": ("AppConnector", _same),
    "netfiltermode": ("NetfilterMode", _netfilter_mode),
    "nostatefulfiltering": ("NoStatefulFiltering", _boolean),
    "posturechecking": ("PostureChecking", _boolean),
    "runsshserver": ("RunSSH", _boolean),
    "runwebclient": ("RunWebClient", _boolean),
    "shieldsup": ("ShieldsUp", _boolean),
    "remoteconfig": ("RemoteConfig", _boolean),
    "autoupdate": ("AutoUpdate", _same),
    "relayserverport": ("RelayServerPort", _same),
    "relayserverstaticendpoints": ("RelayServerStaticEndpoints", _same),
}

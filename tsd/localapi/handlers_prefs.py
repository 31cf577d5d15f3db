"""Preferences and login: prefs, check-prefs, start, login-interactive, logout (tailscale: `ipn/localapi/localapi.go`).

Bodies follow Go's habit that keys match in any case; unknown keys are ignored by the backend.
"""

from __future__ import annotations

import base64
import binascii

from tsd.base.errors import TsdError
from tsd.localapi import schema
from tsd.localapi.backend import ApiError, Json, PrefsError
from tsd.localapi.call import JSON, Call, Endpoint, Response, compact, empty, json_error, pretty, text, write_by_post

_PREF_NAMES = (*schema.default_prefs(), *schema.OPTIONAL_PREFS)
_CANONICAL = {
    name.lower(): name
    for name in (*_PREF_NAMES, *(name + "Set" for name in _PREF_NAMES), "Check", "Apply", "Advertise")
}
_START_FIELDS = {name.lower(): name for name in ("FrontendLogID", "UpdatePrefs", "AuthKey")}
_BOOLS = frozenset(name for name, value in schema.default_prefs().items() if isinstance(value, bool))
_STRINGS = frozenset(name for name, value in schema.default_prefs().items() if isinstance(value, str))
_LISTS = frozenset(("AdvertiseTags", "AdvertiseRoutes", "AdvertiseServices", "RelayServerStaticEndpoints"))


def canonical(value: Json, names: dict[str, str] | None = None) -> Json:
    """Keys in their own spelling, whatever case the caller used; an exact key wins."""
    table = _CANONICAL if names is None else names
    result: Json = {}
    for key, item in value.items():
        name = table.get(key.lower(), key)
        if name == key or name not in value:
            result[name] = item
    return result


def check_types(prefs: Json) -> None:
    """Refuse what Go's decoder refuses: a field of another type. Raises ApiError(400)."""
    for name, value in prefs.items():
        if value is None:
            continue
        wanted = _wanted_type(name)
        is_bool_for_int = wanted is int and isinstance(value, bool)
        if wanted is not None and (not isinstance(value, wanted) or is_bool_for_int):
            raise ApiError(400, f"cannot use JSON {type(value).__name__} as the value of {name}")


def _wanted_type(name: str) -> type | None:
    if name == "AutoUpdateSet" or name in ("AutoUpdate", "AppConnector", "Config"):
        return dict
    if name in _BOOLS or (name.endswith("Set") and name.removesuffix("Set") in _PREF_NAMES):
        return bool
    if name in _STRINGS or name in ("AutoExitNode", "OperatorUser", "ProfileName"):
        return str
    if name in _LISTS:
        return list
    return int if name in ("NetfilterMode", "RelayServerPort") else None


async def prefs(call: Call) -> Response:
    if call.method in ("GET", "HEAD"):
        return pretty(call.backend.prefs())
    if call.method != "PATCH":
        return text(405, "unsupported method")
    if not call.can_write:
        return text(403, "prefs write access denied")
    masked = canonical(await call.read_object())
    check_types(masked)
    try:
        return pretty(await call.backend.edit_prefs(masked))
    except PrefsError as error:
        return json_error(400, str(error), key="Error")


async def check_prefs(call: Call) -> Response:
    wanted = canonical(await call.read_object("invalid JSON body"))
    check_types(wanted)
    try:
        await call.backend.check_prefs(wanted)
    except PrefsError as error:
        return json_error(200, str(error), key="Error")
    return compact({})


async def start(call: Call) -> Response:
    options = canonical(await call.read_object(), _START_FIELDS)
    if isinstance(options.get("UpdatePrefs"), dict):
        options["UpdatePrefs"] = canonical(options["UpdatePrefs"])
        check_types(options["UpdatePrefs"])
    await call.backend.start(options)
    return empty()


async def login_interactive(call: Call) -> Response:
    await call.backend.login_interactive()
    return empty()


async def logout(call: Call) -> Response:
    await call.backend.logout(reason_of(call))
    return empty()


def reason_of(call: Call) -> str:
    """The text behind `--reason`. Raises ApiError(400) when it does not decode."""
    try:
        return base64.b64decode(call.head.get("X-Tailscale-Reason"), validate=True).decode()
    except (binascii.Error, ValueError):
        raise ApiError(400, "the X-Tailscale-Reason header is not base64 text") from None


async def reset_auth(call: Call) -> Response:
    await call.backend.reset_auth()
    return empty()


async def set_use_exit_node_enabled(call: Call) -> Response:
    raise ApiError(500, "no exit node was chosen before; pick one with `tsctl set --exit-node=`")


async def reload_config(call: Call) -> Response:
    try:
        return compact({"Reloaded": await call.backend.reload_config(), "Err": ""})
    except TsdError as err:
        return compact({"Reloaded": False, "Err": str(err)})


async def shutdown(call: Call) -> Response:
    await call.backend.shutdown()
    return Response(200, content_type=JSON)


ENDPOINTS = (
    Endpoint("prefs", prefs),
    write_by_post("check-prefs", check_prefs, denied="checkprefs access denied"),
    write_by_post("start", start, wrong_method=(400, "want POST")),
    write_by_post(
        "login-interactive", login_interactive, denied="login access denied", wrong_method=(400, "want POST")
    ),
    write_by_post("logout", logout, denied="logout access denied", wrong_method=(400, "want POST")),
    write_by_post("reset-auth", reset_auth, denied="reset-auth modify access denied", wrong_method=(405, "use POST")),
    write_by_post(
        "set-use-exit-node-enabled", set_use_exit_node_enabled, wrong_method=(405, "use POST"), method_first=True
    ),
    write_by_post("reload-config", reload_config, wrong_method=(405, "use POST")),
    write_by_post("shutdown", shutdown, wrong_method=(405, "only POST allowed"), method_first=True),
)

"""`tsctl up` and `tsctl login`: flags are the complete set of settings, so what is left out must not change silently.

Order of the calls (tailscale: `cmd/tailscale/cli/up.go`): status, prefs, then either one edit (already running), or the
bus first (mask 0) and then the edit or check-prefs, start, login-interactive, until the bus says Running.
"""

from __future__ import annotations

from typing import Any

from tsctl import context as ctx
from tsctl.goflags import DURATION, Command, Failure, Flag, Parsed, UsageError
from tsctl.prefflags import UP_SETTINGS, Prefs, flags_of, masked, needs_forwarding, resolve_exit_node
from tsctl.risk import LOSE_SSH, confirm_lose_ssh
from tsctl.settings import flag_text, print_firewall_wiring, print_forwarding_warnings, user_name
from tsctl.upwait import LoginWatcher
from tsd.base.authkey import read_auth_key
from tsd.base.errors import ConfigError
from tsd.localapi.schema import CONTROL_URL_SYNONYMS, NEEDS_LOGIN, RUNNING, ZERO_NODE_KEY, default_prefs

_LOGIN_FLAGS = (
    Flag("auth-key", "key to log in with, or file:PATH to read it from a file", aliases=("authkey",)),
    Flag("timeout", "how long to wait until the node runs; 0 for ever", 0.0, kind=DURATION),
    Flag("qr", "show the login URL as a QR code too", False),
    Flag("qr-format", "auto, ascii, large or small", "auto"),
    Flag("host-routes", "only true is possible", True, is_hidden=True),
)
_UP_FLAGS = (
    Flag("reset", "set everything that is not mentioned to its default", False),
    Flag("force-reauth", "log in again, even if the key is still good", False),
    Flag("json", "print progress as JSON", False),
    Flag("accept-risk", f"skip the questions about risks: {LOSE_SSH}, all"),
)
_DETAILS = (
    "Without flags, brings the node up with the settings it has.\n"
    "With flags, they are the complete set of settings: tsctl refuses to change a setting that you did\n"
    "not mention, and prints the command that keeps it. `tsctl set` changes single settings instead."
)


def up_command(context: ctx.Context) -> Command:
    flags = (*flags_of(UP_SETTINGS), *_LOGIN_FLAGS, *_UP_FLAGS)

    def run(parsed: Parsed) -> None:
        _check_args(parsed)
        _Up(context, parsed, auth_key=given_auth_key(parsed)).run()

    return Command("up", "Connect to the tailnet, logging in if needed", run, flags=flags, details=_DETAILS, max_args=0)


def login_command(context: ctx.Context) -> Command:
    flags = (*flags_of(UP_SETTINGS), *_LOGIN_FLAGS, Flag("nickname", "name of the new profile"))

    def run(parsed: Parsed) -> None:
        _check_args(parsed)
        auth_key = given_auth_key(parsed)
        parsed.values |= {"reset": False, "force-reauth": False, "json": False, "accept-risk": ""}
        context.client.call("PUT", "profiles/", b"", expect=(201,))
        _Up(context, parsed, auth_key=auth_key, nickname=parsed.text("nickname")).run()

    return Command("login", "Log in to a tailnet with a new profile", run, flags=flags, max_args=0)


COMMANDS = {"up": up_command, "login": login_command}


_SETTING_NAMES = frozenset(setting.name for setting in UP_SETTINGS)


def _check_args(parsed: Parsed) -> None:
    if not parsed.flag("host-routes"):
        raise UsageError("--host-routes can only be true")
    if parsed.text("qr-format") not in ("auto", "ascii", "large", "small"):
        raise UsageError("--qr-format is one of auto, ascii, large, small")
    if parsed.flag("exit-node-allow-lan-access") and not parsed.text("exit-node"):
        raise UsageError("--exit-node-allow-lan-access can only be used with --exit-node")


def given_auth_key(parsed: Parsed) -> str:
    """The key itself, from the flag or from the file that it names; "" without the flag."""
    if "auth-key" not in parsed.mentioned:
        return ""
    try:
        return read_auth_key(parsed.text("auth-key"))
    except ConfigError as err:
        raise UsageError(str(err)) from None


class _Up:
    """One run of `up`."""

    def __init__(self, context: ctx.Context, parsed: Parsed, *, auth_key: str, nickname: str = "") -> None:
        self.client = context.client
        self.context = context
        self.parsed = parsed
        self.auth_key = auth_key
        self.nickname = nickname
        self.status: dict[str, Any] = {}
        self.current: Prefs = {}
        self.wanted: Prefs = {}

    def run(self) -> None:
        self.status = self.client.status()
        values = self._values()
        if needs_forwarding(values):
            print_forwarding_warnings(self.context)
        self.current = self.client.prefs()
        self.wanted = self._wanted(values)
        is_simple = not self.parsed.flag("reset") and self._is_simple()
        if not is_simple and not self.parsed.flag("reset"):
            self._refuse_reverts()
        self._check_control_url(is_simple)
        self._ask_about_risks()
        if self._is_just_an_edit(is_simple):
            self._edit(is_simple)
        else:
            self._bring_up(is_simple)
        if values["netfilter-mode"] == "nodivert":
            print_firewall_wiring(self.context)
        self._print_health()

    def _is_mentioned(self, name: str) -> bool:
        return name in self.parsed.mentioned

    def _values(self) -> dict[str, Any]:
        """Flag values with names resolved; also the place where nonsense is refused before anything is asked."""
        values: dict[str, Any] = dict(self.parsed.values)
        values["exit-node"] = resolve_exit_node(self.parsed.text("exit-node"), self.status)
        values["login-server"] = checked_url(self.parsed.text("login-server"))
        for setting in UP_SETTINGS:
            setting.write({}, values[setting.name])
        if values["netfilter-mode"] != "on":
            ctx.out(f"Warning: netfilter-mode={values['netfilter-mode']}: firewall rules are now up to you.")
        return values

    def _wanted(self, values: dict[str, Any]) -> Prefs:
        """What the flags say; settings without a flag stay as they are. Without a word on settings, all do."""
        if self._says_nothing() and self.current.get("ControlURL"):
            return {**default_prefs(), **self.current, "WantRunning": True, "LoggedOut": False}
        wanted = {**default_prefs(), **self.current}
        for setting in UP_SETTINGS:
            if setting.name not in ("advertise-exit-node", "advertise-routes"):
                setting.write(wanted, values[setting.name])
        wanted["AdvertiseRoutes"] = None
        for setting in UP_SETTINGS:
            if setting.name in ("advertise-exit-node", "advertise-routes"):
                setting.write(wanted, values[setting.name])
        if not self.current.get("ControlURL") and not self.parsed.flag("reset"):
            self._keep_early(wanted)
        wanted["WantRunning"], wanted["LoggedOut"] = True, False
        if self.nickname:
            wanted["ProfileName"] = self.nickname
        keeps_operator = self.current.get("OperatorUser") == user_name() and not self._is_mentioned("operator")
        if keeps_operator and user_name() and not self.parsed.flag("reset"):
            wanted["OperatorUser"] = user_name()
        return wanted

    def _keep_early(self, wanted: Prefs) -> None:
        """What `set` said before the first login stays: no command can be demanded that the user gave already."""
        said = {pref for setting in UP_SETTINGS if self._is_mentioned(setting.name) for pref in setting.prefs}
        for setting in UP_SETTINGS:
            if setting.name != "login-server" and said.isdisjoint(setting.prefs):
                wanted.update({pref: self.current[pref] for pref in setting.prefs if pref in self.current})

    def _is_simple(self) -> bool:
        """No settings mentioned, and logged in: bring up what there is."""
        profile = (self.current.get("Config") or {}).get("UserProfile") or {}
        is_known = bool(profile.get("LoginName")) and self.status.get("BackendState") != NEEDS_LOGIN
        is_login_asked = self._is_mentioned("auth-key") or self._is_mentioned("force-reauth")
        return self._says_nothing() and is_known and not is_login_asked

    def _says_nothing(self) -> bool:
        """No settings mentioned, at most how to log in: the settings stay, as an expired key is no reason to ask."""
        return not self.nickname and not self.parsed.flag("reset") and _SETTING_NAMES.isdisjoint(self.parsed.mentioned)

    def _refuse_reverts(self) -> None:
        """The check against accidental changes. Raises Failure with a command that can be pasted."""
        if not self.current.get("ControlURL"):
            return
        missing = []
        for setting in UP_SETTINGS:
            if self._is_mentioned(setting.name) or self._is_exempt(setting.name):
                continue
            now = setting.read(self.current, self.status)
            if now != setting.read(self.wanted, self.status):
                missing.append(flag_text(setting.name, now))
        if not missing:
            return
        given = [
            flag_text(flag.name, value if isinstance(value, bool) else _as_typed(flag, value))
            for flag in sorted((*flags_of(UP_SETTINGS), *_LOGIN_FLAGS, *_UP_FLAGS), key=lambda one: one.name)
            if self._is_mentioned(flag.name)
            for value in [self.parsed.values[flag.name]]
        ]
        command = " ".join([f"{ctx.program(self.context.socket_path)} up", *given, *sorted(missing)])
        raise Failure(
            "Error: `tsctl up` with flags sets everything, and this would change settings you did not mention.\n"
            "This keeps them (with --reset they go back to their defaults; `tsctl set` changes single settings):\n"
            f"\n\t{command}\n"
        )

    def _is_exempt(self, name: str) -> bool:
        if name == "login-server":
            return same_control_url(self.current.get("ControlURL") or "", self.wanted["ControlURL"])
        return name == "stateful-filtering" and not self.current.get("NoStatefulFiltering")

    def _is_control_url_changed(self) -> bool:
        return not same_control_url(self.current.get("ControlURL") or "", self.wanted["ControlURL"])

    def _check_control_url(self, is_simple: bool) -> None:
        is_running = self.status.get("BackendState") == RUNNING
        if self._is_control_url_changed() and is_running and not is_simple and not self.parsed.flag("force-reauth"):
            raise Failure("can't change --login-server without --force-reauth")

    def _ask_about_risks(self) -> None:
        accepted = self.parsed.text("accept-risk")
        if self._is_mentioned("ssh") and self.parsed.flag("ssh") != bool(self.current.get("RunSSH")):
            confirm_lose_ssh(accepted, "Changing --ssh would cut the SSH connection you are using.")
        if self.parsed.flag("force-reauth"):
            confirm_lose_ssh(accepted, "Logging in again may cut the SSH connection you are using.")

    def _is_just_an_edit(self, is_simple: bool) -> bool:
        if self.status.get("BackendState") != RUNNING or self.parsed.flag("force-reauth") or self.auth_key:
            return False
        has_new_tags = (self.current.get("AdvertiseTags") or None) != self.wanted["AdvertiseTags"]
        return is_simple or not (self._is_control_url_changed() or has_new_tags)

    def _edit(self, is_simple: bool) -> None:
        names = ["WantRunning"]
        for setting in UP_SETTINGS:
            if not is_simple and (self._is_mentioned(setting.name) or self.parsed.flag("reset")):
                names += [name for name in setting.prefs if name not in names]
        self.client.call("PATCH", "prefs", masked(self.wanted, names))

    def _bring_up(self, is_simple: bool) -> None:
        watcher = LoginWatcher(
            self.client,
            timeout_s=self.parsed.seconds("timeout"),
            as_json=self.parsed.flag("json"),
            shows_qr=self.parsed.flag("qr"),
            qr_format=self.parsed.text("qr-format"),
            has_auth_key=bool(self.auth_key),
            old_url=str(self.status.get("AuthURL") or ""),
            old_key=str((self.status.get("Self") or {}).get("PublicKey") or ZERO_NODE_KEY),
            is_reauth=self.parsed.flag("force-reauth"),
        )
        try:
            if is_simple:
                self.client.call("PATCH", "prefs", masked({"WantRunning": True}, ["WantRunning"]))
            else:
                self._start()
            watcher.wait()
        finally:
            watcher.close()

    def _start(self) -> None:
        self.client.call("POST", "check-prefs", self.wanted)
        options = {"FrontendLogID": "", "UpdatePrefs": self.wanted, "AuthKey": self.auth_key}
        self.client.call("POST", "start", options, expect=(204,))
        if self.parsed.flag("force-reauth") or not self.status.get("HaveNodeKey"):
            self.client.call("POST", "login-interactive", b"", expect=(204,))

    def _print_health(self) -> None:
        """After success only what the user should act upon now."""
        found = self.client.status(with_peers=False).get("Health") or []
        marks = (
            "SSH enabled, but",
            "--accept-routes",
            "locked out",
            "lock state",
            "update available: ",
            "without effect",
        )
        worth = [str(text) for text in found if any(mark in str(text) for mark in marks)]
        if len(worth) == 1:
            ctx.note(worth[0])
        elif worth:
            ctx.note("# Health check warnings:\n" + "\n".join(f"#     - {text}" for text in worth))


def _as_typed(flag: Flag, value: str | int | float) -> str:
    from tsd.localapi.schema import format_duration

    return format_duration(float(value)) if flag.kind == DURATION else str(value)


def checked_url(url: str) -> str:
    """The login server as given; refused when it is no http(s) URL."""
    scheme, separator, rest = url.partition("://")
    url = f"{scheme.lower()}{separator}{rest}"
    if url and (not separator or not url.startswith(("http:", "https:")) or not rest.strip("/") or " " in url):
        hint = f", such as https://{url}" if url and not separator and " " not in url else ""
        raise UsageError(f"invalid --login-server {ctx.quoted(url)}; it must be an http or https URL{hint}")
    if url:
        from tsd.base.errors import ConfigError
        from tsd.base.login_url import parse_login_server

        try:
            parse_login_server(url)
        except ConfigError as error:
            raise UsageError(str(error)) from None
    return url


def same_control_url(one: str, other: str) -> bool:
    one, other = one.rstrip("/"), other.rstrip("/")
    return one == other or (one in CONTROL_URL_SYNONYMS and other in CONTROL_URL_SYNONYMS)

"""User intent as one frozen value: prefs, their Go JSON form, and masked edits.

tailscale: ipn/prefs.go (names and defaults), types/persist/persist.go (`Config`). Pure values: nothing here reads
the store, the network map or the clock. What a coordination server will judge (tags, routes, hostnames) is not
judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tsd.base.addr import AddrPort, IPAddress, IPPrefix
from tsd.base.errors import DecodeError
from tsd.base.keys import LockPrivate, NodePrivate
from tsd.engine.account import gojson

DEFAULT_CONTROL_URL = "https://controlplane.tailscale.com"
CONTROL_URL_SYNONYM = "https://login.tailscale.com"

NETFILTER_OFF, NETFILTER_NODIVERT, NETFILTER_ON = 0, 1, 2

ZERO_NODE_KEY = "privkey:" + "0" * 64
ZERO_LOCK_KEY = "nlpriv:" + "0" * 128


PrefsError = gojson.PrefsError


@dataclass(frozen=True, slots=True)
class UserProfile:
    """Who owns the node, as the coordination server told us."""

    id: int = 0
    login_name: str = ""
    display_name: str = ""
    profile_pic_url: str = ""
    groups: tuple[str, ...] = ()

    @classmethod
    def from_go(cls, raw: Any) -> UserProfile:
        values = gojson.folded(raw, "UserProfile")
        return cls(
            id=gojson.integer(values.get("id"), "UserProfile.ID"),
            login_name=gojson.text(values.get("loginname"), "UserProfile.LoginName"),
            display_name=gojson.text(values.get("displayname"), "UserProfile.DisplayName"),
            profile_pic_url=gojson.text(values.get("profilepicurl"), "UserProfile.ProfilePicURL"),
            groups=gojson.texts(values.get("groups"), "UserProfile.Groups"),
        )

    def to_go(self) -> dict[str, Any]:
        out: dict[str, Any] = {"ID": self.id, "LoginName": self.login_name, "DisplayName": self.display_name}
        if self.profile_pic_url:
            out["ProfilePicURL"] = self.profile_pic_url
        if self.groups:
            out["Groups"] = list(self.groups)
        return out


@dataclass(frozen=True, slots=True)
class Persist:
    """What a login leaves behind: the identity of the node in one tailnet (`Config` in the stored prefs)."""

    private_node_key: NodePrivate | None = None
    old_private_node_key: NodePrivate | None = None
    user_profile: UserProfile = field(default_factory=UserProfile)
    network_lock_key: LockPrivate | None = None
    node_id: str = ""
    disallowed_tka_state_ids: tuple[str, ...] = ()
    attestation_key: Any = None

    @property
    def is_known_node(self) -> bool:
        """Whether the server has told us who we are; only then a profile is worth storing."""
        return bool(self.node_id and self.user_profile.login_name)

    @classmethod
    def from_go(cls, raw: Any) -> Persist:
        """Raises `PrefsError`, so that a stored profile with a broken key can be set aside by name."""
        values = gojson.folded(raw, "Config")
        return cls(
            private_node_key=_node_key(values.get("privatenodekey"), "Config.PrivateNodeKey"),
            old_private_node_key=_node_key(values.get("oldprivatenodekey"), "Config.OldPrivateNodeKey"),
            user_profile=UserProfile.from_go(values.get("userprofile")),
            network_lock_key=_lock_key(values.get("networklockkey"), "Config.NetworkLockKey"),
            node_id=gojson.text(values.get("nodeid"), "Config.NodeID"),
            disallowed_tka_state_ids=gojson.texts(values.get("disallowedtkastateids"), "Config.DisallowedTKAStateIDs"),
            attestation_key=gojson.carried(values.get("attestationkey"), "Config.AttestationKey"),
        )

    def to_go(self, with_keys: bool) -> dict[str, Any]:
        def node(key: NodePrivate | None) -> str:
            return key.text() if with_keys and key is not None else ZERO_NODE_KEY

        lock = self.network_lock_key
        out: dict[str, Any] = {
            "PrivateNodeKey": node(self.private_node_key),
            "OldPrivateNodeKey": node(self.old_private_node_key),
            "UserProfile": self.user_profile.to_go(),
            "NetworkLockKey": lock.text() if with_keys and lock is not None else ZERO_LOCK_KEY,
            "NodeID": self.node_id,
        }
        if with_keys and self.attestation_key is not None:
            out["AttestationKey"] = self.attestation_key
        if self.disallowed_tka_state_ids:
            out["DisallowedTKAStateIDs"] = list(self.disallowed_tka_state_ids)
        return out


def _node_key(raw: Any, where: str) -> NodePrivate | None:
    text = gojson.text(raw, where)
    if raw is None or text == ZERO_NODE_KEY:
        return None
    try:
        return NodePrivate.parse(text)
    except DecodeError as err:
        raise PrefsError(f"{where}: {err.reason}") from None


def _lock_key(raw: Any, where: str) -> LockPrivate | None:
    text = gojson.text(raw, where)
    if raw is None or text == ZERO_LOCK_KEY:
        return None
    try:
        return LockPrivate.parse(text)
    except DecodeError as err:
        raise PrefsError(f"{where}: {err.reason}") from None


@dataclass(frozen=True, slots=True)
class Prefs:
    """What the user asked for. Change it with `edit`, or `dataclasses.replace` inside the engine."""

    control_url: str = ""
    route_all: bool = False
    exit_node_id: str = ""
    exit_node_ip: IPAddress | None = None
    auto_exit_node: str = ""
    internal_exit_node_prior: str = ""
    exit_node_allow_lan_access: bool = False
    corp_dns: bool = True
    run_ssh: bool = False
    run_web_client: bool = False
    want_running: bool = False
    logged_out: bool = False
    shields_up: bool = False
    advertise_tags: tuple[str, ...] = ()
    hostname: str = ""
    notepad_urls: bool = False
    force_daemon: bool = False
    egg: bool = False
    advertise_routes: tuple[IPPrefix, ...] = ()
    advertise_services: tuple[str, ...] = ()
    sync: bool | None = None
    no_snat: bool = False
    no_stateful_filtering: bool | None = True
    netfilter_mode: int = NETFILTER_ON
    operator_user: str = ""
    profile_name: str = ""
    auto_update_check: bool = True
    auto_update_apply: bool | None = None
    app_connector_advertise: bool = False
    posture_checking: bool = False
    netfilter_kind: str = ""
    remote_config: bool = False
    drive_shares: tuple[Any, ...] = ()
    relay_server_port: int | None = None
    relay_server_static_endpoints: tuple[AddrPort, ...] = ()
    persist: Persist | None = None

    @classmethod
    def fresh(cls) -> Prefs:
        """The prefs of a profile that never logged in."""
        return cls(logged_out=True)

    @property
    def without_effect(self) -> list[str]:
        """Flags of settings that are kept, because a state may move to other daemons, but that nothing here acts on."""
        wishes = {
            "--ssh": self.run_ssh,
            "--webclient": self.run_web_client,
            "--advertise-connector": self.app_connector_advertise,
            "--auto-update": self.auto_update_apply,
            "--relay-server-port": self.relay_server_port is not None,
            "--report-posture": self.posture_checking,
        }
        return [flag for flag, is_set in wishes.items() if is_set]

    @property
    def control_url_or_default(self) -> str:
        return DEFAULT_CONTROL_URL if self.control_url in ("", CONTROL_URL_SYNONYM) else self.control_url

    @property
    def advertises_exit_node(self) -> bool:
        return {p.version for p in self.advertise_routes if p.prefixlen == 0} == {4, 6}

    @property
    def wants_exit_node(self) -> bool:
        return bool(self.exit_node_id or self.exit_node_ip or self.auto_exit_node)

    @property
    def node_key(self) -> NodePrivate | None:
        return None if self.persist is None else self.persist.private_node_key

    @classmethod
    def from_go(cls, raw: Any, base: Prefs | None = None) -> Prefs:
        """Read Go JSON over `base` (defaults when None): absent fields keep their value, null is the zero value.

        Raises `PrefsError` naming the field.
        """
        values = gojson.folded(raw, "prefs")
        changes = {}
        for go_name, spec in FIELDS.items():
            folded_name = go_name.lower()
            if folded_name in values:
                changes.update(spec.read(values[folded_name], go_name))
        return replace(base if base is not None else cls(), **changes)

    def to_go(self, with_keys: bool = False) -> dict[str, Any]:
        """The Go JSON object, in upstream's field order; without keys, `Config` keeps profile and node ID."""
        out: dict[str, Any] = {}
        for go_name, spec in FIELDS.items():
            if go_name == "Config":
                out[go_name] = None if self.persist is None else self.persist.to_go(with_keys)
                continue
            value = spec.write(self)
            if value is not gojson.OMIT:
                out[go_name] = value
        return out


class FieldSpec(NamedTuple):
    """How one Go field maps to attributes of `Prefs`."""

    read: Callable[[Any, str], dict[str, Any]]
    write: Callable[[Prefs], Any]


def _plain(
    attribute: str,
    read: Callable[[Any, str], Any],
    write: Callable[[Any], Any] = lambda value: value,
    omit: Any = gojson.OMIT,
) -> FieldSpec:
    """`omit` is the attribute's value that `omitempty` leaves out."""

    def written(prefs: Prefs) -> Any:
        value = getattr(prefs, attribute)
        return gojson.OMIT if value == omit else write(value)

    return FieldSpec(lambda raw, name: {attribute: read(raw, name)}, written)


def _flag(attribute: str, omit_empty: bool = False) -> FieldSpec:
    return _plain(attribute, gojson.boolean, omit=False if omit_empty else gojson.OMIT)


def _text(attribute: str, omit_empty: bool = False) -> FieldSpec:
    return _plain(attribute, gojson.text, omit="" if omit_empty else gojson.OMIT)


def _texts(attribute: str) -> FieldSpec:
    return _plain(attribute, gojson.texts, gojson.null_when_empty)


def _read_auto_update(raw: Any, name: str) -> dict[str, Any]:
    values = gojson.folded(raw, name)
    return {
        "auto_update_check": gojson.boolean(values.get("check"), "AutoUpdate.Check"),
        "auto_update_apply": gojson.opt_boolean(values.get("apply"), "AutoUpdate.Apply"),
    }


def _read_app_connector(raw: Any, name: str) -> dict[str, Any]:
    values = gojson.folded(raw, name)
    return {"app_connector_advertise": gojson.boolean(values.get("advertise"), "AppConnector.Advertise")}


def _read_netfilter_mode(raw: Any, name: str) -> int:
    mode = gojson.integer(raw, name)
    if mode not in (NETFILTER_OFF, NETFILTER_NODIVERT, NETFILTER_ON):
        raise PrefsError(f"{name}: {mode} is none of 0 (off), 1 (nodivert), 2 (on)")
    return mode


FIELDS: Mapping[str, FieldSpec] = {
    "ControlURL": _text("control_url"),
    "RouteAll": _flag("route_all"),
    "ExitNodeID": _text("exit_node_id"),
    "ExitNodeIP": _plain("exit_node_ip", gojson.address, lambda ip: "" if ip is None else str(ip)),
    "AutoExitNode": _text("auto_exit_node", omit_empty=True),
    "InternalExitNodePrior": _text("internal_exit_node_prior"),
    "ExitNodeAllowLANAccess": _flag("exit_node_allow_lan_access"),
    "CorpDNS": _flag("corp_dns"),
    "RunSSH": _flag("run_ssh"),
    "RunWebClient": _flag("run_web_client"),
    "WantRunning": _flag("want_running"),
    "LoggedOut": _flag("logged_out"),
    "ShieldsUp": _flag("shields_up"),
    "AdvertiseTags": _texts("advertise_tags"),
    "Hostname": _text("hostname"),
    "NotepadURLs": _flag("notepad_urls"),
    "ForceDaemon": _flag("force_daemon", omit_empty=True),
    "Egg": _flag("egg", omit_empty=True),
    "AdvertiseRoutes": _plain("advertise_routes", gojson.prefixes, gojson.strings_or_null),
    "AdvertiseServices": _texts("advertise_services"),
    "Sync": _plain("sync", gojson.opt_boolean),
    "NoSNAT": _flag("no_snat"),
    "NoStatefulFiltering": _plain("no_stateful_filtering", gojson.opt_boolean),
    "NetfilterMode": _plain("netfilter_mode", _read_netfilter_mode),
    "OperatorUser": _text("operator_user", omit_empty=True),
    "ProfileName": _text("profile_name", omit_empty=True),
    "AutoUpdate": FieldSpec(_read_auto_update, lambda p: {"Check": p.auto_update_check, "Apply": p.auto_update_apply}),
    "AppConnector": FieldSpec(_read_app_connector, lambda p: {"Advertise": p.app_connector_advertise}),
    "PostureChecking": _flag("posture_checking"),
    "NetfilterKind": _text("netfilter_kind"),
    "RemoteConfig": _flag("remote_config"),
    "DriveShares": _plain("drive_shares", gojson.objects, gojson.null_when_empty),
    "RelayServerPort": _plain("relay_server_port", gojson.opt_port, omit=None),
    "RelayServerStaticEndpoints": _plain(
        "relay_server_static_endpoints", gojson.addr_ports, gojson.strings_or_null, omit=()
    ),
    "Config": FieldSpec(lambda raw, _: {"persist": None if raw is None else Persist.from_go(raw)}, lambda p: None),
}

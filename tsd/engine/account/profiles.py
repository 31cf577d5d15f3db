"""Profiles: several logins on one machine, kept in the layout of tailscaled.state so that an identity can move.

tailscale: ipn/ipnlocal/profiles.go, ipn/store.go. Keys of the store: `_machinekey`, `_profiles`, `_current-profile`,
`profile-<4 hex>` (prefs with the node's keys), `_daemon` (prefs of versions before profiles). Three more of ours, which
Go programs ignore: `_tsd-draft`, the prefs of a login that has not finished, so that a restart goes on with the same
node key; `_tsd-addresses/<id>`, the node's own addresses, so that a stopped node can tell them after a restart;
`_tsd-lock/<id>`, the chain of tailnet lock.
Windows users and their sentinel keys are not handled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from tsd.base.clock import Clock
from tsd.base.entropy import Entropy
from tsd.base.errors import DecodeError, StateError, TsdError
from tsd.base.keys import MachinePrivate
from tsd.engine.account import gojson
from tsd.engine.account.prefs import CONTROL_URL_SYNONYM, Prefs, PrefsError, UserProfile
from tsd.hull import StateStore

log = logging.getLogger(__name__)

MACHINE_KEY = "_machinekey"
KNOWN_PROFILES_KEY = "_profiles"
CURRENT_PROFILE_KEY = "_current-profile"
LEGACY_PREFS_KEY = "_daemon"
DRAFT_KEY = "_tsd-draft"
ADDRESSES_KEY = "_tsd-addresses/"
LOCK_KEY = "_tsd-lock/"


class ProfileNotFound(TsdError):
    """No profile has that ID."""

    def __init__(self, profile_id: str) -> None:
        super().__init__(
            f"profile not found: {profile_id or '(empty ID)'}; `tsctl switch --list` shows those there are"
        )


@dataclass(frozen=True, slots=True)
class NetworkProfile:
    magic_dns_name: str = ""
    domain_name: str = ""
    display_name: str = ""

    @classmethod
    def from_go(cls, raw: Any) -> NetworkProfile:
        values = gojson.folded(raw, "NetworkProfile")
        return cls(*(gojson.text(values.get(name), name) for name in ("magicdnsname", "domainname", "displayname")))

    def to_go(self) -> dict[str, Any]:
        return {
            "MagicDNSName": self.magic_dns_name,
            "DomainName": self.domain_name,
            "DisplayName": self.display_name,
        }


@dataclass(frozen=True, slots=True)
class LoginProfile:
    """One login. An empty `id` means that it has not been stored yet."""

    id: str = ""
    name: str = ""
    network: NetworkProfile = field(default_factory=NetworkProfile)
    key: str = ""
    user: UserProfile = field(default_factory=UserProfile)
    node_id: str = ""
    local_user_id: str = ""
    control_url: str = ""
    created: str = ""

    @classmethod
    def from_go(cls, raw: Any) -> LoginProfile:
        values = gojson.folded(raw, "profile")
        texts = {
            attribute: gojson.text(values.get(attribute.replace("_", "")), attribute)
            for attribute in ("id", "name", "key", "node_id", "local_user_id", "control_url", "created")
        }
        return cls(
            network=NetworkProfile.from_go(values.get("networkprofile")),
            user=UserProfile.from_go(values.get("userprofile")),
            **texts,
        )

    def to_go(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "ID": self.id,
            "Name": self.name,
            "NetworkProfile": self.network.to_go(),
            "Key": self.key,
            "UserProfile": self.user.to_go(),
            "NodeID": self.node_id,
            "LocalUserID": self.local_user_id,
            "ControlURL": self.control_url,
        }
        if self.created:
            out["Created"] = self.created
        return out


class Profiles:
    """The profile in use, its prefs, and the others. Every change is in the store when the call returns.

    `set_aside` names stored profiles that cannot be read, each with the reason; their bytes stay in the store.
    Raises `StateError` from the constructor when the list of profiles itself cannot be read.
    """

    def __init__(self, store: StateStore, entropy: Entropy, clock: Clock) -> None:
        self._store = store
        self._entropy = entropy
        self._clock = clock
        self._known: dict[str, LoginProfile] = {}
        self._unreadable: dict[str, Any] = {}
        self.set_aside: dict[str, str] = {}
        self.current = LoginProfile()
        self.prefs = Prefs.fresh()
        self.on_delete: Callable[[str], None] = lambda profile_id: None
        self.on_switch: Callable[[], None] | None = None
        """Called after the current profile became another node (not after updates of the same)."""
        self._load_known()
        self._load_current()

    # --- reading -----------------------------------------------------------------------------------------------

    def list(self) -> list[LoginProfile]:
        """Stored profiles, oldest first."""
        return sorted(self._known.values(), key=lambda p: (p.created, p.name, p.network.domain_name))

    def by_id(self, profile_id: str) -> LoginProfile:
        """Raises `ProfileNotFound`."""
        if profile_id == self.current.id:
            return self.current
        if profile_id not in self._known:
            raise ProfileNotFound(profile_id)
        return self._known[profile_id]

    def machine_key(self) -> MachinePrivate:
        """The key of this machine for every profile, made on first use. Raises `StateError` when unreadable."""
        raw = self._store.get(MACHINE_KEY)
        if raw:
            try:
                return MachinePrivate.parse(raw.decode("ascii", "replace").strip())
            except DecodeError as err:
                raise StateError(
                    f"{self._store.where}: {MACHINE_KEY} cannot be read ({err.reason}); restore the file from a"
                    " backup, or remove it to join as a new machine"
                ) from None
        if self._known:
            log.warning(
                "%s: the machine key is missing, so a new one is made; a server that asks for the old one takes no"
                " login of this file any more: restore the file from a backup, or log in anew",
                self._store.where,
            )
        made = MachinePrivate.generate(self._entropy)
        self._store.put(MACHINE_KEY, made.text().encode())
        return made

    def addresses(self) -> tuple[str, ...]:
        """The current profile's own addresses as the server last gave them; empty when it never did."""
        raw = self._store.get(ADDRESSES_KEY + self.current.id) if self.current.id else None
        return tuple((raw or b"").decode("ascii", "replace").split())

    # --- changing ----------------------------------------------------------------------------------------------

    def save(self, prefs: Prefs, network: NetworkProfile | None = None) -> LoginProfile:
        """Make `prefs` those of the current profile.

        Once the server has told who we are, the profile gets an ID and is stored. A login that turns out to be a
        node which another profile already describes takes that profile over, and duplicates go.
        """
        persist = prefs.persist
        if persist is None or not persist.is_known_node:
            self.prefs = prefs
            self._write_prefs(self.current, prefs)
            return self.current
        profile = self._merge_duplicates(prefs)
        profile = self._described(profile, prefs, network if network is not None else profile.network)
        is_draft = not self.current.id
        self.current, self.prefs = profile, prefs
        self._known[profile.id] = profile
        self._write_prefs(profile, prefs)
        self._write_known()
        self._store.put(CURRENT_PROFILE_KEY, profile.key.encode())
        if is_draft:
            self._store.put(DRAFT_KEY, None)
        return profile

    def remember_addresses(self, addresses: Iterable[str]) -> None:
        """For `addresses` after a restart; a profile that is not stored yet has none."""
        if self.current.id:
            self._store.put(ADDRESSES_KEY + self.current.id, " ".join(addresses).encode())

    def new(self) -> None:
        """Leave the current profile for an empty one, which is stored only when its login succeeds."""
        self._use(LoginProfile(), Prefs.fresh())
        self._store.put(DRAFT_KEY, None)

    def switch(self, profile_id: str) -> bool:
        """Whether the profile changed. Raises `ProfileNotFound`, or `StateError` when its prefs cannot be read."""
        if profile_id and profile_id == self.current.id:
            return False
        profile = self.by_id(profile_id)
        try:
            prefs = self._read_prefs(profile.key)
        except PrefsError as err:
            raise StateError(f"profile {profile.id} ({profile.name}) cannot be read: {err}") from None
        self._use(profile, prefs)
        self._store.put(CURRENT_PROFILE_KEY, profile.key.encode())
        return True

    def delete(self, profile_id: str) -> None:
        """Forget a login with its keys; deleting the current one leaves an empty profile in use."""
        if not profile_id and not self.current.id:
            self.new()
            return
        profile = self.by_id(profile_id)
        if profile.id == self.current.id:
            self.new()
        self._store.put(profile.key, None)
        self._store.put(f"_serve/{profile.id}", None)
        self._store.put(ADDRESSES_KEY + profile.id, None)
        self._store.put(LOCK_KEY + profile.id, None)
        self._known.pop(profile.id, None)
        self._write_known()
        self.on_delete(profile.id)

    # --- inside ------------------------------------------------------------------------------------------------

    def _use(self, profile: LoginProfile, prefs: Prefs) -> None:
        self.current, self.prefs = profile, prefs
        if self.on_switch is not None:
            self.on_switch()

    def _merge_duplicates(self, prefs: Prefs) -> LoginProfile:
        assert prefs.persist is not None
        user_id, node_id = prefs.persist.user_profile.id, prefs.persist.node_id
        same = [
            p
            for p in self.list()
            if p.control_url == prefs.control_url and (p.user.id == user_id or p.node_id == node_id)
        ]
        for duplicate in same[1:]:
            self._store.put(duplicate.key, None)
            self._store.put(LOCK_KEY + duplicate.id, None)
            del self._known[duplicate.id]
            self.on_delete(duplicate.id)
        return same[0] if same else self.current

    def _described(self, profile: LoginProfile, prefs: Prefs, network: NetworkProfile) -> LoginProfile:
        assert prefs.persist is not None
        user = prefs.persist.user_profile
        if not profile.id:
            profile_id = self._unused_id()
            profile = replace(profile, id=profile_id, key=f"profile-{profile_id}", created=self._timestamp())
        return replace(
            profile,
            name=prefs.profile_name or user.login_name,
            network=network,
            user=replace(user, display_name=user.display_name or user.login_name),
            node_id=prefs.persist.node_id,
            control_url=prefs.control_url,
        )

    def _unused_id(self) -> str:
        while True:
            profile_id = self._entropy(2).hex()
            if profile_id not in self._known and profile_id not in self._unreadable:
                return profile_id

    def _timestamp(self) -> str:
        seconds, nanoseconds = divmod(self._clock.wall_ns(), 1_000_000_000)
        whole = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{whole}.{nanoseconds:09d}Z"

    def _write_prefs(self, profile: LoginProfile, prefs: Prefs) -> None:
        raw = gojson.dumps(prefs.to_go(with_keys=True), indent="\t")
        if profile.key:
            self._store.put(profile.key, raw)
        elif prefs != Prefs.fresh():
            self._store.put(DRAFT_KEY, raw)

    def _write_known(self) -> None:
        listed = {profile_id: profile.to_go() for profile_id, profile in self._known.items()} | self._unreadable
        self._store.put(KNOWN_PROFILES_KEY, gojson.dumps(dict(sorted(listed.items()))))

    def _read_prefs(self, key: str) -> Prefs:
        """Raises `PrefsError`."""
        raw = self._store.get(key)
        if not raw:
            return Prefs.fresh()
        prefs = Prefs.from_go(gojson.loads(raw, key))
        return replace(prefs, control_url="") if prefs.control_url == CONTROL_URL_SYNONYM else prefs

    def _load_known(self) -> None:
        raw = self._store.get(KNOWN_PROFILES_KEY)
        try:
            entries = gojson.loads(raw, KNOWN_PROFILES_KEY) if raw else {}
            if not isinstance(entries, dict):
                raise PrefsError(f"{KNOWN_PROFILES_KEY}: want an object")
        except PrefsError as err:
            raise StateError(
                f"{self._store.where}: the list of profiles cannot be read ({err}); restore the file from a backup,"
                " or remove it to join as a new machine"
            ) from None
        for profile_id, entry in entries.items():
            self._load_entry(profile_id, entry)

    def _load_entry(self, profile_id: str, entry: Any) -> None:
        try:
            profile = LoginProfile.from_go(entry)
            if not profile.key:
                raise PrefsError("its Key is empty")
            if not self._store.get(profile.key):
                raise PrefsError(f"its prefs ({profile.key}) are missing or empty")
            self._read_prefs(profile.key)
        except PrefsError as err:
            self.set_aside[profile_id] = str(err)
            self._unreadable[profile_id] = entry
            log.warning("profile %s is set aside: %s", profile_id, err)
        else:
            self._known[profile_id] = profile if profile.id == profile_id else replace(profile, id=profile_id)

    def _load_current(self) -> None:
        pointer = self._store.get(CURRENT_PROFILE_KEY)
        key = (pointer or b"").decode("utf-8", "replace")
        if pointer is None and len(self._known) == 1:
            # A store that was put together by hand or copied in part: there is no doubt which one is meant.
            key = next(iter(self._known.values())).key
        for profile in self._known.values():
            if profile.key == key:
                self.current, self.prefs = profile, self._read_prefs(key)
                return
        if self._is_adopted(key) or self._is_only_one_left(key):
            return
        if not key and not self._known and self._migrate_legacy():
            return
        self._load_draft()

    def _is_adopted(self, key: str) -> bool:
        """The pointer names a profile that the list has lost, but its prefs are there: the login goes on."""
        profile_id = key.removeprefix("profile-")
        try:
            prefs = self._read_prefs(key) if key != profile_id and profile_id not in self._unreadable else Prefs.fresh()
        except PrefsError:
            return False
        if prefs.persist is None or not prefs.persist.is_known_node:
            return False
        log.warning("profile %s was missing in the list of profiles", profile_id)
        draft = LoginProfile(id=profile_id, key=key, created=self._timestamp())
        self.current, self.prefs = self._described(draft, prefs, NetworkProfile()), prefs
        self._known[profile_id] = self.current
        return True

    def _is_only_one_left(self, key: str) -> bool:
        """The pointer names nothing that the store has ever heard of, and there is one login: it must be meant."""
        if not key or self._store.get(key) or self._unreadable or len(self._known) != 1:
            return False
        profile = next(iter(self._known.values()))
        log.warning("the profile in use, %s, does not exist; the only one there is, %s, is used", key, profile.id)
        self.current, self.prefs = profile, self._read_prefs(profile.key)
        return True

    def _load_draft(self) -> None:
        try:
            self.prefs = self._read_prefs(DRAFT_KEY)
        except PrefsError as err:
            log.warning("an unfinished login is dropped: %s", err)

    def _migrate_legacy(self) -> bool:
        """Take over prefs from before profiles; the old key stays, for a way back."""
        raw = self._store.get(LEGACY_PREFS_KEY)
        if not raw:
            return False
        try:
            prefs = self._read_prefs(LEGACY_PREFS_KEY)
        except PrefsError as err:
            self.set_aside[LEGACY_PREFS_KEY] = str(err)
            log.warning("prefs from before profiles are set aside: %s", err)
            return False
        log.info("prefs from before profiles taken over")
        self.save(prefs)
        return True

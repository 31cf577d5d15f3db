"""A LocalBackend without an engine: prefs, profiles, a state machine that obeys at once, a bus, two peers.

For tests of the LocalAPI server and of command-line clients. Auth keys that begin with `bad` are refused.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

from tsd.base.notify import Mask
from tsd.localapi import schema
from tsd.localapi.backend import EtagMismatch, Json, OptionalBackend, PrefsError

SELF_KEY = "nodekey:" + "11" * 32
PEER_KEY = "nodekey:" + "22" * 32
OTHER_KEY = "nodekey:" + "33" * 32
CREATED = "2026-01-02T03:04:05.6Z"


def peer_status(number: int, name: str, key: str, **changes: Any) -> Json:
    addresses = [f"100.64.0.{number}", f"fd7a:115c:a1e0::{number}"]
    found: Json = {
        "ID": str(number),
        "NodeID": number,
        "PublicKey": key,
        "HostName": name,
        "DNSName": f"{name}.tn.example.",
        "OS": "linux",
        "UserID": 1,
        "TailscaleIPs": addresses,
        "AllowedIPs": [f"{addresses[0]}/32", f"{addresses[1]}/128"],
        "Addrs": [f"192.0.2.{number}:41641"],
        "CurAddr": "",
        "Relay": "lab",
        "PeerRelay": "",
        "RxBytes": 0,
        "TxBytes": 0,
        "Created": CREATED,
        "LastWrite": schema.ZERO_TIME,
        "LastSeen": schema.ZERO_TIME,
        "LastHandshake": schema.ZERO_TIME,
        "Online": True,
        "ExitNode": False,
        "ExitNodeOption": False,
        "Active": False,
        "PeerAPIURL": [f"http://{addresses[0]}:4321"],
        "TaildropTarget": 0,
        "NoFileSharingReason": "",
        "InNetworkMap": True,
        "InMagicSock": True,
        "InEngine": True,
    }
    found.update(changes)
    return found


def node_of(peer: Json) -> Json:
    return {
        "ID": peer["NodeID"],
        "StableID": peer["ID"],
        "Name": peer["DNSName"],
        "User": peer["UserID"],
        "Key": peer["PublicKey"],
        "Addresses": [f"{ip}/{128 if ':' in ip else 32}" for ip in peer["TailscaleIPs"]],
        "AllowedIPs": peer["AllowedIPs"],
        "Hostinfo": {"OS": peer["OS"], "Hostname": peer["HostName"]},
        "Created": CREATED,
        "ComputedName": peer["HostName"],
        "ComputedNameWithHost": peer["HostName"],
    }


class FakeWatch:
    def __init__(self, owner: FakeBackend, number: int) -> None:
        self.session_id = f"{number:016x}"
        self.queue: asyncio.Queue[Json | None] = asyncio.Queue()
        self._owner = owner

    def __aiter__(self) -> AsyncIterator[Json]:
        return self

    async def __anext__(self) -> Json:
        found = await self.queue.get()
        if found is None:
            raise StopAsyncIteration
        return found

    def close(self) -> None:
        if self in self._owner.watches:
            self._owner.watches.remove(self)


class FakeBackend(OptionalBackend):
    def __init__(self, *, is_logged_in: bool = True, operator: str = "") -> None:
        self.state = schema.STOPPED if is_logged_in else schema.NEEDS_LOGIN
        self.has_node_key = is_logged_in
        self.auth_url = ""
        self.current: Json = schema.default_prefs()
        self.peers = [
            peer_status(
                2, "b", PEER_KEY, Active=True, CurAddr="192.0.2.2:41641", RxBytes=716, TxBytes=988, ExitNodeOption=True
            ),
            peer_status(3, "other", OTHER_KEY, Online=False, LastSeen="2026-01-02T03:04:05Z", Tags=["tag:x"], UserID=2),
        ]
        self.health: list[str] = []
        self.watches: list[FakeWatch] = []
        self.calls: list[tuple[str, Any]] = []
        self.serve: bytes | None = None
        self.stored_profiles: list[Json] = []
        self.dial_targets: dict[tuple[str, int], Any] = {}
        self.answers_pings = True
        self.cancelled_pings = 0
        self._sessions = 0
        self.has_shut_down = False
        if operator:
            self.current["OperatorUser"] = operator
        if is_logged_in:
            self.current["ControlURL"] = "http://control.example"
            self._log_in()
            self.current["WantRunning"] = True
            self.state = schema.RUNNING

    # --- state machine ---

    def _log_in(self) -> None:
        self.has_node_key = True
        self.auth_url = ""
        self.current["LoggedOut"] = False
        self.current["Config"] = {
            "PrivateNodeKey": "privkey:" + "0" * 64,
            "OldPrivateNodeKey": "privkey:" + "0" * 64,
            "UserProfile": {"ID": 1, "LoginName": "lab@example.com", "DisplayName": "Lab"},
            "NetworkLockKey": "nlpriv:" + "0" * 128,
            "NodeID": "1",
        }
        if not self.stored_profiles:
            self.stored_profiles.append(self._profile("9d99", "lab@example.com"))

    def _profile(self, profile_id: str, name: str) -> Json:
        return {
            "ID": profile_id,
            "Name": name,
            "NetworkProfile": {"MagicDNSName": "tn.example", "DomainName": "tn.example", "DisplayName": ""},
            "Key": f"profile-{profile_id}",
            "UserProfile": {"ID": 1, "LoginName": name, "DisplayName": "Lab"},
            "NodeID": "1",
            "LocalUserID": "",
            "ControlURL": "http://control.example",
        }

    def notify(self, **values: Any) -> None:
        for watch in list(self.watches):
            watch.queue.put_nowait(self._notify_value(values))

    def _notify_value(self, values: Json) -> Json:
        base: Json = dict.fromkeys(
            ("ErrMessage", "LoginFinished", "State", "Prefs", "NetMap", "Engine", "BrowseToURL", "DriveShares")
        )
        return {"Version": "fake", **base, **values}

    def set_state(self, name: str) -> None:
        if name != self.state:
            self.state = name
            self.notify(State=schema.STATE_NAMES.index(name))

    def _restart(self) -> None:
        self.set_state(schema.STARTING)
        self.set_state(schema.RUNNING)

    def approve(self) -> None:
        """Someone visited the auth URL."""
        self._log_in()
        self.notify(LoginFinished={})
        self.set_state(schema.STARTING)
        self.notify(SelfChange=node_of(self._self_status()))
        self._restart()

    # --- LocalBackend ---

    def _is_mapped(self) -> bool:
        return self.has_node_key and self.state not in (schema.NO_STATE, schema.NEEDS_LOGIN)

    def _self_status(self) -> Json:
        own = peer_status(1, "a", SELF_KEY, Online=self.state == schema.RUNNING)
        if not self._is_mapped():
            own.update(PublicKey=schema.ZERO_NODE_KEY, TailscaleIPs=None, DNSName="", ID="", NodeID=0, UserID=0)
        return own

    def status(self, with_peers: bool = True) -> Json:
        mapped = self._is_mapped()
        found: Json = {
            "Version": "0.0-fake",
            "TUN": False,
            "BackendState": self.state,
            **({"HaveNodeKey": True} if self.has_node_key else {}),
            "AuthURL": self.auth_url,
            "TailscaleIPs": self._self_status()["TailscaleIPs"],
            "Self": self._self_status(),
            "Health": list(self.health),
            "MagicDNSSuffix": "tn.example" if mapped else "",
            "CurrentTailnet": {"Name": "tn.example", "MagicDNSSuffix": "tn.example", "MagicDNSEnabled": True}
            if mapped
            else None,
            "CertDomains": None,
            "ExtraRecords": None,
            "Peer": {peer["PublicKey"]: peer for peer in self.peers} if with_peers and mapped else None,
            "User": {
                "1": {"ID": 1, "LoginName": "lab@example.com", "DisplayName": "Lab"},
                "2": {"ID": 2, "LoginName": "tagged-devices", "DisplayName": "Tagged Devices"},
            }
            if mapped
            else None,
            "ClientVersion": None,
        }
        return found

    def prefs(self) -> Json:
        return copy.deepcopy(self.current)

    async def edit_prefs(self, masked: Json) -> Json:
        self.calls.append(("edit_prefs", masked))
        names = [name for name in (*schema.default_prefs(), *schema.OPTIONAL_PREFS) if masked.get(f"{name}Set") is True]
        edited = {**self.current, **{name: masked.get(name) for name in names}}
        self._check(edited)
        was_wanted = self.current["WantRunning"]
        self.current = edited
        self.notify(Prefs=self.prefs())
        if was_wanted and not self.current["WantRunning"] and self.has_node_key:
            self.set_state(schema.STOPPED)
        elif self.current["WantRunning"] and not was_wanted and self.has_node_key:
            self._restart()
        return self.prefs()

    async def check_prefs(self, prefs: Json) -> None:
        self.calls.append(("check_prefs", prefs))
        self._check(prefs)

    def _check(self, prefs: Json) -> None:
        if prefs.get("RunSSH"):
            raise PrefsError("the SSH server is not available here")

    async def start(self, options: Json) -> None:
        self.calls.append(("start", options))
        wanted = options.get("UpdatePrefs")
        if wanted:
            self.current = {**wanted, "Config": self.current["Config"]}
        self.current["LoggedOut"] = False
        self.notify(Prefs=self.prefs())
        key = options.get("AuthKey") or ""
        if key.startswith("bad"):
            self.set_state(schema.NEEDS_LOGIN)
            self.notify(ErrMessage="invalid key: it does not exist")
        elif key or self.has_node_key:
            self._log_in()
            self.notify(LoginFinished={})
            self._restart()

    async def login_interactive(self) -> None:
        self.calls.append(("login_interactive", None))
        if not self.has_node_key or self.state == schema.RUNNING:
            self.auth_url = "http://control.example/register/abc"
            self.notify(BrowseToURL=self.auth_url)

    async def logout(self, reason: str = "") -> None:
        self.calls.append(("logout", reason))
        self.has_node_key = False
        self.stored_profiles.clear()
        self.set_state(schema.STOPPED)
        self.current = schema.default_prefs()
        self.notify(Prefs=self.prefs())
        self.set_state(schema.NEEDS_LOGIN)

    async def reset_auth(self) -> None:
        await self.logout()

    def watch(self, mask: int) -> FakeWatch:
        self.calls.append(("watch", mask))
        self._sessions += 1
        watch = FakeWatch(self, self._sessions)
        first: Json = {}
        if mask & Mask.INITIAL_STATE:
            first |= {"SessionID": watch.session_id, "State": schema.STATE_NAMES.index(self.state)}
        if mask & Mask.INITIAL_PREFS:
            first["Prefs"] = self.prefs()
        if first:
            watch.queue.put_nowait(self._notify_value(first))
        self.watches.append(watch)
        return watch

    async def ping(self, ip: str, kind: str, size: int) -> Json:
        self.calls.append(("ping", (ip, kind, size)))
        found: Json = {
            "IP": ip,
            "NodeIP": "",
            "NodeName": "",
            "Err": "",
            "LatencySeconds": 0,
            "Endpoint": "",
            "PeerRelay": "",
            "DERPRegionID": 0,
            "DERPRegionCode": "",
        }
        if ip in self._self_status()["TailscaleIPs"]:
            return {**found, "Err": f"{ip} is local Tailscale IP", "IsLocalIP": True}
        peer = next((one for one in self.peers if ip in one["TailscaleIPs"]), None)
        if peer is None:
            return {**found, "Err": "no matching peer"}
        if not self.answers_pings:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled_pings += 1
                raise
        found |= {"NodeIP": ip, "NodeName": peer["HostName"], "LatencySeconds": 0.0123}
        match kind:
            case "disco" if peer["CurAddr"]:
                found["Endpoint"] = peer["CurAddr"]
            case "disco":
                found |= {"DERPRegionID": 900, "DERPRegionCode": "lab"}
            case "TSMP":
                found["PeerAPIPort"] = 4321
            case "peerapi":
                found |= {"NodeName": peer["DNSName"], "PeerAPIURL": f"http://{ip}:4321"}
        return found

    def whois(self, addr: str, proto: str) -> Json | None:
        host = addr.rpartition("]:")[0].lstrip("[") if "]:" in addr else addr
        host = host.partition(":")[0] if host.count(":") == 1 and not addr.startswith("nodekey") else host
        for peer in (self._self_status(), *self.peers):
            if host == peer["PublicKey"] or host in (peer["TailscaleIPs"] or ()):
                node = node_of(peer)
                if peer.get("Tags"):
                    node["Tags"] = peer["Tags"]
                return {"Node": node, "UserProfile": self.user_profile(peer["UserID"]), "CapMap": None}
        return None

    async def dial(self, network: str, host: str, port: int) -> Any:
        target = self.dial_targets.get((host, port))
        if target is None:
            raise OSError(f"dial failure: nothing at {host}:{port}")
        return target() if callable(target) else target

    def derp_map(self) -> Json | None:
        node = {"Name": "900a", "RegionID": 900, "HostName": "127.0.0.1", "IPv4": "127.0.0.1", "STUNPort": 3478}
        region = {"RegionID": 900, "RegionCode": "lab", "RegionName": "Lab", "Nodes": [node]}
        return {"Regions": {"900": region}}

    def dns_config(self) -> Json | None:
        if not self._is_mapped():
            return None
        return {"Routes": {"corp.example": [{"Addr": "192.0.2.53"}]}, "Domains": ["tn.example"], "Proxied": True}

    def dns_os_config(self) -> Json:
        manager = {
            "Mode": "direct",
            "Because": ["systemd-resolved does not answer", "resolv.conf names nobody as its writer"],
            "Nameservers": ["100.100.100.100"],
            "SearchDomains": ["tn.example"],
            "MatchDomains": [],
            "Trouble": "",
        }
        return {"Nameservers": ["192.0.2.1"], "SearchDomains": ["lan"], "MatchDomains": [], "Manager": manager}

    async def dns_query(self, name: str, qtype: str) -> tuple[bytes, list[Json], Json]:
        labels = b"".join(bytes([len(label)]) + label.encode() for label in name.rstrip(".").split(".")) + b"\0"
        question = labels + b"\0\x01\0\x01"
        answer = b"\xc0\x0c\0\x01\0\x01\0\0\x02\x58\0\x04" + bytes([100, 64, 0, 2])
        reply = b"\0\x01\x81\x80\0\x01\0\x01\0\0\0\0" + question + answer
        return reply, [{"Addr": "192.0.2.53"}], {"AnsweredBy": {"Addr": "192.0.2.53", "Transport": "udp"}}

    def profiles(self) -> list[Json]:
        return list(self.stored_profiles)

    def current_profile(self) -> Json:
        return self.stored_profiles[0] if self.stored_profiles else {**self._profile("", ""), "Key": ""}

    async def new_profile(self) -> None:
        self.calls.append(("new_profile", None))
        self.has_node_key = False
        self.current = schema.default_prefs()
        self.set_state(schema.NEEDS_LOGIN)

    async def switch_profile(self, profile_id: str) -> None:
        found = next((one for one in self.stored_profiles if one["ID"] == profile_id), None)
        if found is None:
            raise KeyError(profile_id)
        self.stored_profiles.remove(found)
        self.stored_profiles.insert(0, found)

    async def delete_profile(self, profile_id: str) -> None:
        self.stored_profiles = [one for one in self.stored_profiles if one["ID"] != profile_id]

    def serve_config(self) -> bytes | None:
        return self.serve

    async def set_serve_config(self, raw: bytes, if_match: str) -> None:
        if if_match == "stale":
            raise EtagMismatch("changed")
        self.serve = b"{}" if raw.strip() == b"null" else raw.strip()

    def tka_status(self) -> Json:
        return {
            "Enabled": False,
            "Head": None,
            "PublicKey": "nlpub:" + "44" * 32,
            "NodeKey": SELF_KEY,
            "NodeKeySigned": False,
            "NodeKeySignature": None,
            "TrustedKeys": None,
            "VisiblePeers": None,
            "FilteredPeers": None,
            "StateID": 0,
        }

    def node_by_id(self, node_id: int) -> Json | None:
        return next((node_of(one) for one in (self._self_status(), *self.peers) if one["NodeID"] == node_id), None)

    def user_profile(self, user_id: int) -> Json | None:
        return (self.status()["User"] or {}).get(str(user_id))

    def user_metrics(self) -> str:
        return "# TYPE tailscaled_advertised_routes gauge\ntailscaled_advertised_routes 0\n"

    def client_metrics(self) -> str:
        return "# TYPE tsd_wakeups counter\ntsd_wakeups 1\n"

    async def debug(self, action: str, body: bytes) -> tuple[str, bytes]:
        self.calls.append(("debug", action))
        if action == "statedir":
            return "application/json", b'"/var/lib/tsd"\n'
        if action == "current-netmap":
            return "application/json", b'{"Name":"a.tn.example."}\n'
        if action in ("rebind", "restun"):
            return "text/plain; charset=utf-8", b"done\n"
        raise KeyError(action)

    async def log_tap(self) -> AsyncIterator[Json]:
        yield {"text": "one line\n", "logtail": {"client_time": CREATED}}
        await asyncio.Event().wait()

    def operator_user(self) -> str:
        return str(self.current.get("OperatorUser") or "")

    async def shutdown(self) -> None:
        self.has_shut_down = True

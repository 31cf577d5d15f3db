"""Tailnet lock on a whole engine, with a control server that a test plays: who comes in, and what is believed."""

from __future__ import annotations

import asyncio
import base64

import pytest

from harness.lockcontrol import Json, LockControl, b64, first_map, locked, public, refused, signed_peer, tell, until
from harness.lockkeys import SECRET, key_id, lock_key, new_authority, new_genesis, sign_node, trusted
from harness.loneengine import lone_engine, peer_json
from tsd.base.errors import TsdError
from tsd.engine.control.hostinfo import self_report
from tsd.engine.lock import lock as lock_module
from tsd.engine.lock.exchange import Exchange
from tsd.engine.lock.gate import Gate, Verdict
from tsd.engine.lock.lock import BEHIND, LOCKED_OUT, UNVERIFIED
from tsd.engine.lock.orders import LockOrders
from tsd.tailcfg.node import Node
from tsd.tka.aum import AUM, hash_text
from tsd.tka.authority import Authority
from tsd.tka.key import Key
from tsd.tka.nodekey import NodeKeySignature, parse_node_key, rotated
from tsplatform.state_file import MemoryStore


async def test_only_signed_peers_come_in() -> None:
    control = LockControl()
    async with locked(control) as lone:
        other = signed_peer(4) | {"Key": str(public(5))}
        await first_map(lone, control, signed_peer(2), peer_json(3), other, signed_peer(6, signer=9))
        assert lone.peer_ids() == [2] and lone.routed("100.64.0.3") is None
        reasons = refused(lone)
        assert set(reasons) == {3, 4, 6}
        assert "not signed" in reasons[3] and "another node key" in reasons[4] and "not trusted" in reasons[6]
        netmap = lone.engine.tailnet.netmap
        assert netmap is not None and list(netmap.peers) == [2]
        assert [path for path, _ in control.asked] == ["bootstrap", "sync/offer"]


async def test_a_peer_that_is_signed_later_comes_in_and_one_that_loses_it_goes() -> None:
    control = LockControl()
    async with locked(control) as lone:
        await first_map(lone, control, peer_json(3))
        assert lone.peer_ids() == []
        await tell(lone, PeersChangedPatch=[{"NodeID": 3, "KeySignature": b64(sign_node(public(3)))}])
        assert lone.peer_ids() == [3] and lone.routed("100.64.0.3") == 3 and refused(lone) == {}
        await tell(lone, PeersChanged=[peer_json(3, Key=str(public(8)), KeySignature=b64(sign_node(public(3))))])
        assert lone.peer_ids() == [] and lone.routed("100.64.0.3") is None
        await tell(lone, PeersRemoved=[3])
        assert refused(lone) == {}


async def test_what_a_refused_peer_does_changes_nothing_else() -> None:
    control = LockControl()
    async with locked(control) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(3))
        await tell(lone, PeersChangedPatch=[{"NodeID": 3, "Endpoints": ["192.0.2.33:1"]}], OnlineChange={"3": False})
        assert lone.peer_ids() == [2]
        await tell(lone, PeersChanged=[signed_peer(7)])
        assert lone.peer_ids() == [2, 7]


async def test_a_change_is_judged_alone_and_comes_out_as_if_all_were_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    control, judged = LockControl(), []
    judge = Gate.judge

    def noted(gate: Gate, node: Node) -> Verdict:
        judged.append(node.id)
        return judge(gate, node)

    async with locked(control) as lone:
        first = sign_node(public(2), rotation=key_id(7))
        later = b64(rotated(first, public(5), lock_key(7).sign))
        await first_map(lone, control, peer_json(2, KeySignature=b64(first)), signed_peer(3), peer_json(4))
        monkeypatch.setattr(Gate, "judge", noted)
        await tell(lone, PeersChangedPatch=[{"NodeID": 3, "Endpoints": ["192.0.2.33:1"]}])
        assert judged == [] and lone.peer_ids() == [2, 3]
        await tell(lone, PeersChanged=[peer_json(5, KeySignature=later)], PeersRemoved=[3])
        assert judged == [5] and lone.peer_ids() == [5] and set(refused(lone)) == {2, 4}
        await tell(lone, PeersRemoved=[5])
        assert judged == [5] and lone.peer_ids() == [2] and set(refused(lone)) == {4}


async def test_peers_that_serve_peerapi_only_need_no_signature() -> None:
    control = LockControl()
    async with locked(control) as lone:
        await first_map(lone, control, peer_json(3, UnsignedPeerAPIOnly=True), peer_json(4))
        assert lone.peer_ids() == [3]


async def test_a_later_node_key_replaces_the_one_that_it_rotated() -> None:
    control = LockControl()
    async with locked(control) as lone:
        first = sign_node(public(2), rotation=key_id(7))
        second = rotated(first, public(3), lock_key(7).sign)
        await first_map(lone, control, peer_json(2, KeySignature=b64(first)), peer_json(3, KeySignature=b64(second)))
        assert lone.peer_ids() == [3] and "replaced" in refused(lone)[2]


async def test_a_key_that_is_not_trusted_any_more_locks_its_nodes_out() -> None:
    control = LockControl(trusted(1), trusted(2))
    async with locked(control) as lone:
        await first_map(lone, control, signed_peer(2, signer=1), signed_peer(3, signer=2))
        assert lone.peer_ids() == [2, 3]
        control.change(remove=(key_id(2),))
        await tell(lone, TKAInfo=control.info())
        assert lone.peer_ids() == [2]
        control.change(add=(trusted(3),))
        await tell(lone, TKAInfo=control.info(), PeersChanged=[signed_peer(5, signer=3)])
        assert lone.peer_ids() == [2, 5]


async def test_without_a_chain_nobody_comes_in_until_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "RETRY_S", 0.01)
    control = LockControl()
    control.is_down = True
    async with locked(control) as lone:
        await first_map(lone, control, signed_peer(2))
        assert lone.peer_ids() == []
        assert any("no answer (HTTP)" in text and "local-disable" in text for text in lone.engine.health.texts())
        control.is_down = False
        await until(lambda: lone.peer_ids() == [2])
        assert not lone.engine.health.is_broken(UNVERIFIED)


@pytest.mark.parametrize("genesis", ["none", "unsigned", "garbage"])
async def test_a_first_update_that_proves_nothing_lets_nobody_in(genesis: str) -> None:
    control = LockControl()
    answers = {"none": "", "unsigned": b64(AUM(5, state=new_authority().state).encode()), "garbage": "AAAA"}
    control.do_bootstrap = lambda request: {"GenesisAUM": answers[genesis]}  # type: ignore[method-assign]
    async with locked(control) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(3))
        assert lone.peer_ids() == [] and lone.engine.health.is_broken(UNVERIFIED)


async def test_a_slow_control_does_not_hold_the_netmap_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_S", 0.01)
    control = LockControl()
    gate = asyncio.Event()
    ask = control.ask

    async def slow(path: str, request: Json) -> Json:
        await gate.wait()
        return await ask(path, request)

    control.ask = slow  # type: ignore[method-assign]
    async with locked(control) as lone:
        await first_map(lone, control, signed_peer(2))
        assert lone.peer_ids() == [] and lone.engine.tailnet.netmap is not None
        gate.set()
        await until(lambda: lone.peer_ids() == [2])


async def test_the_chain_outlives_the_daemon_and_control_cannot_talk_it_away() -> None:
    control, store = LockControl(), MemoryStore()
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2))
    control.secret = b"?" * 32
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(3), TKAInfo=None)
        assert lone.peer_ids() == [2], "control does not mention the lock, and its secret is wrong"
        await first_map(lone, control, signed_peer(2), peer_json(3), TKAInfo={"Disabled": True})
        assert lone.peer_ids() == [2]
        control.secret = SECRET
        await first_map(lone, control, signed_peer(2), peer_json(3), TKAInfo={"Disabled": True})
        assert lone.peer_ids() == [2, 3] and lone.engine.lock.authority is None
    async with locked(control, store=store) as lone:
        assert lone.engine.lock.authority is None


async def test_a_chain_of_strangers_is_not_followed() -> None:
    control = LockControl()
    async with locked(control) as lone:
        await first_map(lone, control, signed_peer(2))
        control.genesis, control.authority = new_genesis(trusted(9), signer=9), new_authority(trusted(1), trusted(9))
        await tell(lone, TKAInfo=control.info(), PeersChanged=[signed_peer(3, signer=9)])
        assert lone.peer_ids() == [2] and lone.engine.health.is_broken(BEHIND)


async def test_a_damaged_chain_lets_nobody_in() -> None:
    control, store = LockControl(), MemoryStore()
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2))
        [name] = [name for name in store.names() if name.startswith("_tsd-lock/")]
    store.put(name, b"AAAA")
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(3), TKAInfo=None)
        assert lone.peer_ids() == [] and lone.engine.health.is_broken(UNVERIFIED)
        await first_map(lone, control, signed_peer(2), peer_json(3))
        assert lone.peer_ids() == [2]


async def test_we_are_told_when_we_are_locked_out_ourselves() -> None:
    control = LockControl()
    async with locked(control) as lone:
        await first_map(lone, control, signed_peer(2))
        [text] = [text for text in lone.engine.health.texts() if "locked out" in text]
        assert f"tsctl lock sign {lone.key.public()}" in text
        own = peer_json(1, Key=str(lone.key.public()), KeySignature=b64(sign_node(lone.key.public())))
        await tell(lone, Node=own)
        assert not lone.engine.health.is_broken(LOCKED_OUT) and lone.peer_ids() == [2]


async def test_control_hears_our_head() -> None:
    control = LockControl()
    async with locked(control) as lone:
        await first_map(lone, control)
        assert self_report(lone.engine).tka_head == hash_text(control.authority.head)


async def test_local_disable_lets_everybody_in_also_after_a_restart() -> None:
    control, store = LockControl(), MemoryStore()
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(3))
        LockOrders(lone.engine).disable_here()
        assert lone.peer_ids() == [2, 3]
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(3))
        assert lone.peer_ids() == [2, 3]


async def test_a_lock_that_was_begun_anew_is_obeyed_once_the_old_one_is_forgotten() -> None:
    control = LockControl()
    async with locked(control) as lone:
        await first_map(lone, control, signed_peer(2), signed_peer(3, signer=9))
        control.genesis = new_genesis(trusted(9), signer=9, state_id=(5, 6))
        control.authority = Authority.bootstrap(control.genesis)
        await tell(lone, TKAInfo=control.info())
        assert lone.peer_ids() == [2]
        LockOrders(lone.engine).disable_here()
        await until(lambda: lone.peer_ids() == [3])
        assert not lone.engine.health.is_broken(BEHIND)


async def test_each_profile_has_its_own_lock() -> None:
    control, store = LockControl(), MemoryStore()
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2))
        first = lone.engine.profiles.current.id
        lone.engine.account.new_profile()
        assert lone.engine.lock.authority is None and lone.engine.lock.refused == {}
        lone.engine.account.switch_profile(first)
        authority = lone.engine.lock.authority
        assert authority is not None and authority.head == control.authority.head
        lone.engine.account.delete_profile(first)
        assert lone.engine.lock.authority is None and not [name for name in store.names() if "_tsd-lock" in name]


async def test_status_and_log() -> None:
    control = LockControl()
    async with locked(control) as lone:
        assert LockOrders(lone.engine).status()["Enabled"] is False
        lone.engine.account._ensure_lock_key()
        await first_map(lone, control, signed_peer(2), peer_json(3))
        orders = LockOrders(lone.engine)
        found = orders.status()
        assert found["Enabled"] is True and bytes(found["Head"]) == control.authority.head
        assert [peer["ID"] for peer in found["VisiblePeers"]] == [2]
        assert [peer["ID"] for peer in found["FilteredPeers"]] == [3]
        assert found["TrustedKeys"][0]["Key"] == str(lock_key(1).public()) and found["NodeKeySigned"] is False
        [entry] = orders.log(50)
        assert entry["Change"] == "checkpoint" and AUM.decode(base64.b64decode(entry["Raw"])) == control.genesis


async def test_orders_of_a_trusted_node() -> None:
    async with lone_engine() as lone:
        lone.engine.account._ensure_lock_key()
        own = lone.engine.account.lock_key
        assert own is not None
        control = LockControl(trusted(1), Key(own.public().raw))
        lone.engine.lock.exchange = Exchange(control.ask)
        await first_map(lone, control)
        orders = LockOrders(lone.engine)
        await orders.sign(public(3), b"")
        path, request = control.asked[-1]
        signature = base64.b64decode(request["Signature"])
        assert path == "sign" and control.authority.admit(public(3), signature) is None
        await orders.modify((trusted(5),), (key_id(1),))
        assert control.authority.is_trusted(key_id(5)) and not control.authority.is_trusted(key_id(1))
        with pytest.raises(TsdError, match="incorrect disablement secret"):
            await orders.disable(b"?" * 32)
        await orders.disable(SECRET)
        assert control.asked[-1][0] == "disable"


async def test_orders_of_a_node_that_is_not_trusted() -> None:
    control = LockControl()
    async with locked(control) as lone:
        lone.engine.account._ensure_lock_key()
        orders = LockOrders(lone.engine)
        with pytest.raises(TsdError, match="not active"):
            await orders.sign(public(3), b"")
        await first_map(lone, control)
        with pytest.raises(TsdError, match="not trusted by Tailnet Lock"):
            await orders.sign(public(3), b"")
        with pytest.raises(TsdError, match="trusted tailnet lock key"):
            await orders.modify((trusted(5),), ())


async def test_switching_it_on_signs_all_nodes() -> None:
    async with lone_engine() as lone:
        lone.engine.account._ensure_lock_key()
        own = lone.engine.account.lock_key
        assert own is not None
        asked: dict[str, Json] = {}

        async def ask(path: str, request: Json) -> Json:
            asked[path] = request
            nodes = [{"NodeID": n, "NodePublic": str(public(n)), "RotationPubkey": b64(key_id(n))} for n in (2, 3)]
            return {"NeedSignatures": nodes} if path == "init/begin" else {}

        lone.engine.lock.exchange = Exchange(ask)
        await LockOrders(lone.engine).init((Key(own.public().raw),), (b"v" * 32,), b"")
        authority = Authority.bootstrap(AUM.decode(base64.b64decode(asked["init/begin"]["GenesisAUM"])))
        for node_id, text in asked["init/finish"]["Signatures"].items():
            signature = NodeKeySignature.decode(base64.b64decode(text))
            assert parse_node_key(signature.pubkey) == public(int(node_id))
            assert authority.admit(public(int(node_id)), signature.encode()) is None
            assert signature.wrapping_pubkey == key_id(int(node_id))

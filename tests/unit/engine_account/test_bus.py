"""The bus: masks, shapes, overflow, rate limit."""

import asyncio
from typing import Any

import pytest

from tsd.base.entropy import SeededEntropy
from tsd.base.errors import ConfigError
from tsd.base.notify import Mask, parse_mask
from tsd.engine.report import bus as bus_module
from tsd.engine.report.bus import LAGGED_TEXT, QUEUE_LENGTH, NotifyBus, wants_first_message

EMPTY = {
    "Version": "1",
    "ErrMessage": None,
    "LoginFinished": None,
    "State": None,
    "Prefs": None,
    "NetMap": None,
    "Engine": None,
    "BrowseToURL": None,
    "DriveShares": None,
}


@pytest.fixture
def bus() -> NotifyBus:
    return NotifyBus("1", SeededEntropy(1), promote=lambda patches: [{"ID": patch["NodeID"]} for patch in patches])


async def test_messages_have_the_always_present_fields(bus: NotifyBus) -> None:
    watch = bus.watch(0)
    bus.publish({"State": 6})
    bus.publish({"State": None})
    message = await anext(watch)
    assert message == {**EMPTY, "State": 6}
    assert list(message) == list(EMPTY)
    assert watch.take() == []


async def test_first_message(bus: NotifyBus) -> None:
    watch = bus.watch(Mask.INITIAL_STATE, {"State": 6})
    first = await anext(watch)
    assert first == {**EMPTY, "SessionID": watch.session_id, "State": 6}
    assert len(watch.session_id) == 16
    prefs_only = await anext(bus.watch(Mask.INITIAL_PREFS, {"Prefs": {}}))
    assert "SessionID" not in prefs_only and prefs_only["Prefs"] == {}
    assert await anext(bus.watch(Mask.INITIAL_CLIENT_VERSION)) == EMPTY
    for mask in (0, 1, 16, 64, 256, 512, 4096, 8192, 32768, 1 << 20):
        assert not wants_first_message(mask)
        assert bus.watch(mask, {"State": 6}).take() == []


async def test_peer_changes_go_to_those_who_asked(bus: NotifyBus) -> None:
    none, changes, patches = bus.watch(0), bus.watch(Mask.PEER_CHANGES), bus.watch(Mask.PEER_PATCHES)
    bus.publish({"PeerChangedPatch": [{"NodeID": 5}]})
    bus.publish({"PeersRemoved": [6], "SelfChange": {"ID": 1}})
    assert [m["SelfChange"] for m in none.take()] == [{"ID": 1}]
    promoted, removed = changes.take()
    assert promoted["PeersChanged"] == [{"ID": 5}] and "PeerChangedPatch" not in promoted
    assert removed["PeersRemoved"] == [6]
    assert patches.take()[0]["PeerChangedPatch"] == [{"NodeID": 5}]


async def test_netmap_policy_and_wireguard_state_bits(bus: NotifyBus) -> None:
    plain, strict = bus.watch(0), bus.watch(Mask.NO_NETMAP | Mask.SYSPOLICY_CHANGES)
    states = bus.watch(Mask.PEER_WIREGUARD_STATE)
    states.take()
    strict.take()
    bus.publish({"NetMap": {}, "Policy": {"x": 1}, "PeerState": {"n": {}}})
    assert plain.take()[0]["NetMap"] == {}
    assert strict.take()[0]["Policy"] == {"x": 1}
    assert states.take()[0]["PeerState"] == {"n": {}}


async def test_health_actions_become_text_without_the_bit(bus: NotifyBus) -> None:
    warning = {"Text": "T.", "PrimaryAction": {"URL": "https://x.example", "Label": "Go"}}
    plain, rich = bus.watch(0), bus.watch(Mask.HEALTH_ACTIONS)
    bus.publish({"Health": {"Warnings": {"c": warning}}})
    assert plain.take()[0]["Health"]["Warnings"]["c"] == {"Text": "T. Go: https://x.example"}
    assert rich.take()[0]["Health"]["Warnings"]["c"] == warning


async def test_engine_updates_are_sent_to_all(bus: NotifyBus) -> None:
    plain = bus.watch(0)
    poller = bus.watch(Mask.ENGINE_UPDATES)
    bus.publish({"Engine": {"RBytes": 1}})
    assert plain.take() and poller.take()


async def test_a_slow_watcher_is_told_once_and_ended(bus: NotifyBus) -> None:
    slow, other = bus.watch(0), bus.watch(0)
    for number in range(QUEUE_LENGTH + 1):
        bus.publish({"State": number % 7})
        other.take()
    bus.publish({"State": 1})
    messages = [message async for message in slow]
    assert [message["ErrMessage"] for message in messages] == [LAGGED_TEXT]
    assert bus.sessions() == [other.session_id]


async def test_closing_wakes_the_reader(bus: NotifyBus) -> None:
    watch = bus.watch(0)
    reader: asyncio.Task[list[Any]] = asyncio.create_task(_all(watch))
    await asyncio.sleep(0)
    bus.close()
    assert await asyncio.wait_for(reader, 1) == []
    watch.close()


async def _all(watch: Any) -> list[Any]:
    return [message async for message in watch]


async def test_rate_limit_merges_what_is_not_notable(bus: NotifyBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_module, "RATE_LIMIT_S", 0.02)
    watch = bus.watch(Mask.RATE_LIMIT)
    for number in range(5):
        bus.publish({"Engine": {"RBytes": number}})
    assert [message["Engine"]["RBytes"] for message in watch.take()] == [0]
    bus.publish({"State": 6})
    assert [(message["State"], message["Engine"]) for message in watch.take()] == [(6, {"RBytes": 4})]
    bus.publish({"Engine": {"RBytes": 9}})
    assert watch.take() == []
    message = await asyncio.wait_for(anext(watch), 1)
    assert message["Engine"] == {"RBytes": 9}
    watch.close()


@pytest.mark.parametrize("text", ["x", "-1", "65536", str(256 | 4096), str(256 | 8192), str(256 | 16384), "1.5"])
def test_masks_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_mask(text)


def test_masks_that_are_taken() -> None:
    assert parse_mask("") == 0
    assert parse_mask("4160") == 4160
    assert parse_mask(str(1 << 25)) == 1 << 25

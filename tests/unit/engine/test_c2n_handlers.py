"""What the coordination server may ask: netmap in Go's shape, candidates, and what we do not know."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import NodePrivate
from tsd.engine.account.prefs import Prefs
from tsd.engine.control.c2n import answer
from tsd.engine.control.c2n_handlers import c2n_handlers
from tsd.engine.report.inspection import NO_TKA_HEAD, Inspection, go_netmap
from tsd.netmap.netmap import Netmap, apply
from tsd.tailcfg.mapresponse import decode_map_response

MAPS = Path(__file__).parents[2] / "vectors" / "maps"
FULL_MAPS = [path for path in sorted(MAPS.glob("*.json")) if '"Node":' in path.read_text()]


def netmap_of(raw: bytes) -> Netmap:
    return apply(None, decode_map_response(raw), wall_ns=0, is_first=True)[0]


class Engine:
    """As much of an engine as the handlers look at."""

    def __init__(self, netmap: Netmap | None) -> None:
        self.options = SimpleNamespace(clock=ManualClock())
        key = NodePrivate.generate(SeededEntropy(1))
        self.account = SimpleNamespace(prefs=Prefs.fresh(), node_key=key, self_node=None)
        self.tailnet = SimpleNamespace(netmap=netmap, peers=[])
        self.health = SimpleNamespace(state=lambda: {"Warnings": None}, visible=list)
        self.reach = SimpleNamespace(home=0, netcheck=SimpleNamespace(drops={"stray": 2}))
        self.plane = None
        self.inspection = Inspection(self)  # type: ignore[arg-type]


async def ask(netmap: Netmap | None, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    handlers = c2n_handlers(Engine(netmap))  # type: ignore[arg-type]
    response = await answer(base64.b64encode(request).decode(), handlers)
    head, _, answered = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), answered.decode()


@pytest.mark.parametrize("path", FULL_MAPS, ids=lambda path: path.stem)
def test_recorded_maps_in_gos_shape(path: Path) -> None:
    shown = go_netmap(netmap_of(path.read_bytes()), "nodekey:" + "1" * 64)
    json.dumps(shown)
    assert [node["ID"] for node in shown["Peers"]] == sorted(node["ID"] for node in shown["Peers"])
    assert len(shown["TKAHead"]) == len(NO_TKA_HEAD), "Go refuses a hash of any other length"
    assert isinstance(shown["AllCaps"], list) and shown["MachineKey"].startswith("mkey:")


async def test_netmap_and_candidate() -> None:
    raw = FULL_MAPS[0].read_bytes()
    netmap = netmap_of(raw)
    status, body = await ask(netmap, "GET", "/debug/netmap")
    assert status == 200 and set(json.loads(body)) == {"current"}
    question: dict[str, Any] = {"candidate": json.loads(raw), "omitFields": ["DERPMap", "Nonsense"]}
    status, body = await ask(netmap, "POST", "/debug/netmap", json.dumps(question).encode())
    both = json.loads(body)
    assert status == 200 and both["current"] == both["candidate"] and "DERPMap" not in both["current"]
    status, body = await ask(None, "GET", "/debug/netmap")
    assert (status, json.loads(body)) == (200, {"current": None})


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"candidate":7}', b'{"candidate":{}}', b'{"candidate":{"Node":[]}}'])
async def test_bad_candidates_are_refused(body: bytes) -> None:
    status, text = await ask(None, "POST", "/debug/netmap", body)
    assert status == 400 and text.startswith("failed to decode")


async def test_the_rest() -> None:
    status, body = await ask(None, "GET", "/debug/prefs")
    prefs = json.loads(body)
    assert status == 200 and prefs["CorpDNS"] is True and "PrivateNodeKey" not in json.dumps(prefs.get("Config") or {})
    assert await ask(None, "GET", "/debug/health") == (200, '{"Warnings":null}')
    status, body = await ask(None, "GET", "/debug/metrics")
    assert status == 200 and "tsd_netcheck_drops_stray 2" in body
    assert (await ask(None, "GET", "/debug/goroutines"))[0] == 200
    assert json.loads((await ask(None, "GET", "/update"))[1])["Supported"] is False
    assert (await ask(None, "POST", "/logtail/flush"))[0] == 500
    assert (await ask(None, "DELETE", "/debug/netmap"))[0] == 405
    assert (await ask(None, "GET", "/debug/nonsense"))[0] == 400
    assert await ask(None, "POST", "/echo", b"hello") == (200, "hello")

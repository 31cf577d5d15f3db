"""Fuzz targets of the account and platform rooms: bytes that come from files, from clients and from the kernel."""

import contextlib
import json

from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.errors import ConfigError, StateError
from tsd.daemon.config import parse_config
from tsd.engine.account import gojson
from tsd.engine.account.edits import edit
from tsd.engine.account.prefs import Prefs, PrefsError
from tsd.engine.account.profiles import Profiles
from tsplatform import netlink
from tsplatform.state_file import MemoryStore, decode, encode


def fuzz_state_file(data: bytes) -> None:
    """A state file decodes to values that encode to the same again, or is refused; profiles in it never raise."""
    try:
        values = decode(data)
    except ValueError:
        return
    assert decode(encode(values)) == values
    store = MemoryStore()
    for name, value in values.items():
        store.put(name, value)
    with contextlib.suppress(StateError):
        profiles = Profiles(store, SeededEntropy(1), ManualClock())
        profiles.save(profiles.prefs)
        profiles.list()


def fuzz_prefs(data: bytes) -> None:
    """Prefs and masked edits from a LocalAPI client."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return
    with contextlib.suppress(PrefsError):
        prefs = Prefs.from_go(raw)
        assert Prefs.from_go(gojson.loads(gojson.dumps(prefs.to_go(with_keys=True)), "again")) == prefs
    with contextlib.suppress(PrefsError):
        edit(Prefs(), raw)


def fuzz_config_file(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        parse_config(data.decode("utf-8", "replace"), "fuzz")


def fuzz_netlink(data: bytes) -> None:
    """Messages of the kernel's form, whatever is in them."""
    for kind, body in netlink.messages(data):
        if kind == netlink.RTM_NEWADDR:
            netlink.parse_address(body)
        elif kind == netlink.RTM_NEWLINK:
            netlink.parse_link(body)

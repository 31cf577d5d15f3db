"""Fuzz targets: updates and node key signatures of tailnet lock."""

from __future__ import annotations

from harness.lockkeys import new_authority, new_genesis, trusted
from tsd.base.errors import DecodeError, TsdError
from tsd.base.keys import NodePublic
from tsd.tka.aum import AUM
from tsd.tka.authority import Authority
from tsd.tka.nodekey import NodeKeySignature


def fuzz_tka_aum(data: bytes) -> None:
    """What is read is written with the same bytes; no stranger's update is taken."""
    try:
        found = AUM.decode(data)
    except DecodeError:
        return
    assert found.encode() == data
    authority = new_authority()
    try:
        assert authority.inform([found]) is authority
    except TsdError:
        return


def fuzz_tka_signature(data: bytes) -> None:
    try:
        found = NodeKeySignature.decode(data)
    except DecodeError:
        return
    assert found.encode() == data
    try:
        Authority.bootstrap(new_genesis(trusted(9), signer=9)).admit(
            NodePublic(found.pubkey[2:34].ljust(32, b"\0")), data
        )
    except TsdError:
        return
    raise AssertionError("a stranger's signature admits a node")

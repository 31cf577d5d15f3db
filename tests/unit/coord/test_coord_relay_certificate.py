"""The relay's own certificate across restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsd.base.entropy import SeededEntropy
from tsd.base.keys import NodePrivate
from tsd.coord.derp import load_certificate

RELAY = NodePrivate.generate(SeededEntropy("relay")).public()
NOW_S = 1_790_000_000.0


def test_the_certificate_lasts_until_its_names_change(tmp_path: Path) -> None:
    first = load_certificate(tmp_path, ["192.0.2.1"], RELAY, NOW_S).pin
    assert load_certificate(tmp_path, ["192.0.2.1"], RELAY, NOW_S).pin == first
    assert load_certificate(tmp_path, ["192.0.2.2"], RELAY, NOW_S).pin != first


@pytest.mark.parametrize("name", ["derp.crt", "derp.key", "derp.names", "derp.chain"])
@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00", None])
def test_damaged_files_are_made_anew(tmp_path: Path, name: str, damage: bytes | None) -> None:
    """As a power cut or a full disk leaves them; clients learn the new pin with the next map."""
    load_certificate(tmp_path, ["192.0.2.1"], RELAY, NOW_S)
    if damage is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(damage)
    assert load_certificate(tmp_path, ["192.0.2.1"], RELAY, NOW_S).pin

"""Which hull is chosen."""

from pathlib import Path

import pytest

from tsplatform import choose
from tsplatform.choose import choose_hull


def test_userspace_is_taken_as_asked() -> None:
    assert choose_hull("userspace-networking").kind == "userspace"


def test_k10_without_a_device_it_falls_to_userspace_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choice = choose_hull("tsd0", has_kernel_hull=True, tun_node=str(tmp_path / "tun"))
    assert choice.kind == "userspace"
    assert "does not exist" in choice.reason
    assert len(caplog.records) == 1
    assert choose_hull("tsd0").reason == "tsd0: this version makes no network devices"


def test_the_list_is_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "tun"
    node.touch()
    monkeypatch.setattr(choose, "_has_net_admin", lambda: True)
    assert choose_hull("tsd0,userspace-networking", True, str(node)).device == "tsd0"
    monkeypatch.setattr(choose, "_has_net_admin", lambda: False)
    choice = choose_hull("tap:x, tsd0,userspace-networking", True, str(node))
    assert (choice.kind, choice.reason.count(";")) == ("userspace", 1)

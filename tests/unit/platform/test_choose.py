"""Which hull is chosen."""

from types import SimpleNamespace
from typing import cast

import pytest

from tsd.base.errors import HullError
from tsd.hull import Hull
from tsplatform.choose import choose_hull

KERNEL, USERSPACE = cast("Hull", SimpleNamespace()), cast("Hull", SimpleNamespace())


def _refuse(device: str) -> Hull:
    raise HullError(f"create {device}: open /dev/net/tun", "No such file or directory", "modprobe tun")


def test_userspace_is_taken_as_asked() -> None:
    assert choose_hull("userspace-networking", _refuse, lambda: USERSPACE) is USERSPACE


def test_k10_without_a_device_it_falls_to_userspace_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_hull("tsd0,userspace-networking", _refuse, lambda: USERSPACE) is USERSPACE
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "/dev/net/tun" in caplog.text and "modprobe tun" in caplog.text
    assert "/dev/net/tun" in USERSPACE.fallback_because


def test_the_list_is_tried_in_order() -> None:
    tried: list[str] = []

    def kernel(device: str) -> Hull:
        tried.append(device)
        return KERNEL if device == "b" else _refuse(device)

    assert choose_hull("tap:x, a,b,userspace-networking", kernel, lambda: USERSPACE) is KERNEL
    assert tried == ["a", "b"]


def test_nothing_is_chosen_that_was_not_asked_for() -> None:
    with pytest.raises(HullError, match=r"--tun=tsd0: create tsd0: .*modprobe tun.*userspace-networking"):
        choose_hull("tsd0", _refuse, lambda: USERSPACE)

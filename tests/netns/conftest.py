"""One topology for all tests of the Linux router: it costs more than what is tried on it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from harness.netlab import NetLab
from harness.routerlab import RouterLab


@pytest.fixture(scope="session")
def router_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterLab]:
    with NetLab(f"tsdR{os.getpid()}", "10.97.20") as lab:
        net = RouterLab(lab, tmp_path_factory.mktemp("router"))
        try:
            yield net.start()
        finally:
            net.close()


@pytest.fixture(scope="module")
def net(router_lab: RouterLab) -> RouterLab:
    """As it was at the start, whatever another file did with it."""
    router_lab.reset()
    return router_lab

"""The kernel's TCP as the oracle of ours: bulk, half-close, RST, zero window, both families, with loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

ROOT = Path(__file__).parent.parent.parent
PROBE = Path(__file__).parent / "netstack_kernel_probe.py"


@pytest.fixture
def namespace() -> Iterator[str]:
    if os.geteuid() or not Path("/dev/net/tun").exists():
        pytest.skip("needs root and /dev/net/tun")
    name = f"tsdCk{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield name
    subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("loss", "reorder", "duplicate", "megabytes"),
    [(0.0, 0.0, 0.0, 20.0), (0.01, 0.0, 0.0, 5.0), (0.05, 0.05, 0.05, 1.0), (0.0, 0.1, 0.0, 5.0)],
)
def test_against_the_kernel(namespace: str, loss: float, reorder: float, duplicate: float, megabytes: float) -> None:
    paths = [str(ROOT), str(ROOT / "platform"), str(ROOT / "native"), str(ROOT / "tests")]
    done = subprocess.run(
        [
            "ip",
            "netns",
            "exec",
            namespace,
            sys.executable,
            str(PROBE),
            *map(str, (loss, reorder, duplicate, megabytes)),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    print(json.dumps(results, indent=1))
    assert {name: result for name, result in results.items() if not result["ok"]} == {}

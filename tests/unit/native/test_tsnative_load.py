"""Which pump is chosen, and that a stale or missing compiled module never hurts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tsnative
from tsd.base.errors import TsdError

ROOT = Path(__file__).resolve().parents[3]


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`code` in a fresh interpreter with the same import path."""
    env = {"PYTHONPATH": ":".join(sys.path), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_abi_numbers_agree() -> None:
    header = (ROOT / "native" / "src" / "core.h").read_text()
    found = re.search(r"#define CORE_ABI (\d+)", header)
    assert found and int(found[1]) == tsnative.ABI


def test_python_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSD_PUMP", "python")
    assert tsnative.load().name == "python"
    assert tsnative.describe() == "python (TSD_PUMP=python)"
    monkeypatch.setenv("TSD_PUMP", "rust")
    with pytest.raises(TsdError, match="want threads, batch or python"):
        tsnative.load()


@pytest.mark.skipif(tsnative.native is None, reason="the native core is not built")
@pytest.mark.parametrize(("choice", "has_threads"), [("", True), ("native", True), ("threads", True), ("batch", False)])
def test_threads_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, choice: str, has_threads: bool) -> None:
    monkeypatch.setenv("TSD_PUMP", choice)
    core = tsnative.load()
    assert core.name.startswith("native")
    assert (tsnative.load_pump(core) is not None) == has_threads


def test_the_python_core_has_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSD_PUMP", "python")
    assert tsnative.load_pump(tsnative.load()) is None


def test_library_aead_means_the_python_pump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TSD_PUMP", raising=False)
    monkeypatch.setenv("TSD_AEAD", "library")
    assert tsnative.load().name == "python"


@pytest.mark.skipif(tsnative.native is None, reason="the native core is not built")
def test_kernel_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TSD_PUMP", raising=False)
    monkeypatch.setenv("TSD_AEAD", "portable")
    assert tsnative.load().name == "native (portable)"
    monkeypatch.setenv("TSD_AEAD", "avx9")
    with pytest.raises(TsdError, match="avx9"):
        tsnative.load()


def test_stale_module_is_not_used() -> None:
    code = """
import sys, types, warnings
stale = types.ModuleType("tsnative._core"); stale.ABI = 0
sys.modules["tsnative._core"] = stale
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import tsnative
print(tsnative.BACKEND, tsnative.load().name, len(seen), "stale" in str(seen[0].message))
"""
    assert run(code).stdout.split() == ["python", "python", "1", "True"]


def test_missing_module_falls_back_or_fails_on_demand() -> None:
    hide = "import sys; sys.modules['tsnative._core'] = None; import tsnative; print(tsnative.load().name)"
    assert run(hide).stdout.split() == ["python"]
    forced = run(hide, TSD_PUMP="native")
    assert forced.returncode != 0 and "not built" in forced.stderr

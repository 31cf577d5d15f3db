"""The packet pump in C, and the choice between it and the Python one.

`load()` gives the fastest `tsd.dataplane.pump.Core` that works here, `load_pump()` threads that move the packets of a
device on it. Environment: `TSD_PUMP=python` forces the Python core, `batch` and `threads` the C core (an error when it
is missing), `batch` without threads: the event loop moves the packets; `native` is `threads`. `TSD_AEAD=avx2|portable`
chooses the AEAD kernel, `TSD_AEAD=library` the Python core, whose AEAD is the library's. A compiled module of another
version is never used.
"""

from __future__ import annotations

import importlib
import os
import warnings
from types import ModuleType

from tsd.base.errors import ConfigError, TsdError
from tsd.dataplane.fdpump import FdPump
from tsd.dataplane.pump import Core

__all__ = ["ABI", "BACKEND", "describe", "load", "load_pump", "native"]

ABI = 3
"""Equals CORE_ABI in native/src/core.h; raised when the glue or the core changes shape."""


def _import_native() -> tuple[ModuleType | None, str]:
    """The compiled module, or None and the reason."""
    try:
        module = importlib.import_module("tsnative._core")
    except ImportError as err:
        return None, f"not built: {err}"
    if getattr(module, "ABI", None) != ABI:
        text = f"stale build (ABI {getattr(module, 'ABI', None)}, want {ABI}): reinstall tsd-net"
        warnings.warn(f"tsnative: {text}; using the Python pump", RuntimeWarning, stacklevel=2)
        return None, text
    return module, ""


native, _why_not = _import_native()


def _choose() -> tuple[str, str]:
    """("native" or "python", reason for python)."""
    pump = os.environ.get("TSD_PUMP", "")
    if pump not in ("", "native", "threads", "batch", "python"):
        raise ConfigError(f"TSD_PUMP={pump}: want threads, batch or python")
    if pump == "python":
        return "python", "TSD_PUMP=python"
    if os.environ.get("TSD_AEAD") == "library":
        return "python", "TSD_AEAD=library"
    if native is None and pump:
        raise ConfigError(f"TSD_PUMP={pump}, but the native pump is {_why_not}")
    return ("native", "") if native is not None else ("python", _why_not)


try:
    BACKEND = _choose()[0]
except TsdError:
    BACKEND = "python"


def load(mtu_bytes: int = 1280) -> Core:
    """A new core. Raises `TsdError` when the environment asks for what is not there."""
    backend, _ = _choose()
    if backend == "native" and native is not None:
        try:
            core: Core = native.NativeCore(mtu_bytes, os.environ.get("TSD_AEAD", ""))
        except RuntimeError as err:
            raise ConfigError(f"native pump: {err}") from None
        return core
    from tsd.dataplane.reference import ReferenceCore

    return ReferenceCore(mtu_bytes)


def load_pump(core: Core) -> FdPump | None:
    """Threads for a core of `load`; None where the environment or the core wants none."""
    if native is None or not isinstance(core, native.NativeCore) or os.environ.get("TSD_PUMP") == "batch":
        return None
    pump: FdPump = native.FdPump(core)
    return pump


def describe() -> str:
    """One line for status and version: which pump runs, and why not the native one."""
    try:
        reason = _choose()[1]
        return load().name + (f" ({reason})" if reason else "")
    except TsdError as err:
        return f"none: {err}"

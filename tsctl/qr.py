"""A URL as a QR code, for a terminal or as a PNG. Empty when segno is not installed: the URL itself is always shown."""

from __future__ import annotations

import io


def terminal_text(url: str, form: str) -> str:
    """`form`: auto or small (half blocks), large (full blocks), ascii (for terminals without block characters)."""
    try:
        import segno
    except ImportError:
        return ""
    code = segno.make(url, error="l", micro=False)
    if form == "ascii" or (form == "auto" and not _shows_blocks()):
        return "\n".join("".join("##" if dark else "  " for dark in row) for row in code.matrix_iter(border=2))
    out = io.StringIO()
    code.terminal(out, border=2, compact=form != "large")
    return out.getvalue().rstrip("\n")


def _shows_blocks() -> bool:
    import sys

    return "utf" in (sys.stderr.encoding or "").lower()


def data_uri(url: str) -> str:
    try:
        import segno
    except ImportError:
        return ""
    return str(segno.make(url, error="l", micro=False).png_data_uri(scale=3))

"""zstd frames of the map stream: bounded decoding, and encoding in the form that Go clients expect.

The standard library has it from Python 3.14; the backport has the same interface.
"""

from __future__ import annotations

import sys
from typing import Any

from tsd.base.errors import DecodeError

if sys.version_info >= (3, 14):
    import compression.zstd as _library
else:
    import backports.zstd as _library

zstd: Any = _library

MAX_MAP_BYTES = 256 << 20


def decompress(frame: bytes, max_bytes: int = MAX_MAP_BYTES) -> bytes:
    """One complete frame, with or without a content size. Raises `DecodeError`, also when it would exceed the bound."""
    limit = {zstd.DecompressionParameter.window_log_max: 27}
    decoder = zstd.ZstdDecompressor(options=limit)
    try:
        plain: bytes = decoder.decompress(frame, max_bytes + 1)
    except (zstd.ZstdError, MemoryError) as err:
        raise DecodeError("zstd", str(err)) from None
    if len(plain) > max_bytes:
        raise DecodeError("zstd", f"more than {max_bytes} bytes")
    if not decoder.eof:
        raise DecodeError("zstd", "truncated frame")
    return plain


def compress(plain: bytes) -> bytes:
    """Level 1 with content size and checksum, as Go's encoder is set."""
    options = {zstd.CompressionParameter.compression_level: 1, zstd.CompressionParameter.checksum_flag: 1}
    frame: bytes = zstd.compress(plain, options=options)
    return frame

"""Key log for Wireshark and tshark (`wg.keylog_file`): who holds these lines can read the captured traffic.

Off unless the user asks; the caller owns the file and its mode.
"""

from __future__ import annotations

from base64 import b64encode


def lines(local_static_private: bytes, remote_static: bytes, local_ephemeral_private: bytes, psk: bytes) -> str:
    """One handshake, as either role, in Wireshark's wg.keylog format; ends with a newline."""
    named = (
        ("LOCAL_STATIC_PRIVATE_KEY", local_static_private),
        ("REMOTE_STATIC_PUBLIC_KEY", remote_static),
        ("LOCAL_EPHEMERAL_PRIVATE_KEY", local_ephemeral_private),
        ("PRESHARED_KEY", psk),
    )
    return "".join(f"{name} = {b64encode(value).decode()}\n" for name, value in named)

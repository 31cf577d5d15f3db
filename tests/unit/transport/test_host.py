"""The host's resolver, as the proxies and the control client use it."""

from __future__ import annotations

import pytest

from tsd.transport.host import resolve_host


@pytest.mark.parametrize("name", ["127.0.0.1\0.example", "\0", "a..b", "a" * 64 + ".example", ".", "\udcff"])
async def test_what_is_no_host_name_is_refused(name: str) -> None:
    with pytest.raises(OSError, match=r"not a host name|not known|No address|failure in name"):
        await resolve_host(name)

"""What an error tells people."""

import errno
import os
import socket

import pytest

from tsd.base.errors import reason_of


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ECONNREFUSED, "Connect call failed ('192.0.2.1', 443)"), os.strerror(errno.ECONNREFUSED)),
        (OSError(errno.EHOSTUNREACH, "[Errno 113] Connect call failed"), os.strerror(errno.EHOSTUNREACH)),
        (OSError(errno.ENOENT, "No such file or directory"), "No such file or directory"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (OSError("no such name: x"), "no such name: x"),
        (ValueError("odd"), "odd"),
    ],
)
def test_the_reason_is_what_the_system_said(error: Exception, text: str) -> None:
    assert reason_of(error) == text

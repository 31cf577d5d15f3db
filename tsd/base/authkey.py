"""Auth keys as users give them: the key, or `file:PATH`. One rule for the command line, the config file and the API.

A key is opaque, its form is its server's business: white space around it, a byte order mark and quotes around the
whole of it (as compose and environment files keep them) are cut; white space and control characters in it are refused.
"""

from __future__ import annotations

from tsd.base.errors import ConfigError

MAX_FILE_BYTES = 65536
_FILE = "file:"


def check_auth_key(text: str, where: str = "the auth key") -> str:
    """The key itself. Raises `ConfigError`."""
    key = text.lstrip("\ufeff").strip()
    if len(key) > 2 and key[0] == key[-1] and key[0] in "\"'":
        key = key[1:-1]
    if not key:
        raise ConfigError(f"{where} is empty: give a key, or {_FILE}PATH")
    if any(char.isspace() or not char.isprintable() for char in key):
        raise ConfigError(f"{where} contains white space or control characters, which no key has")
    return key


def read_auth_key(given: str) -> str:
    """The same for a key that may be in a file."""
    if not given.startswith(_FILE):
        return check_auth_key(given)
    path = given.removeprefix(_FILE)
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES).decode()
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) else "it is not text"
        raise ConfigError(f"cannot read the auth key from {path or 'a file without a name'}: {reason}") from None
    return check_auth_key(text, f"the auth key file {path}")

"""The version of tsd, once; pyproject.toml says the same (checked by a test)."""

VERSION = "0.1.0"
LONG_VERSION = f"{VERSION}-tsd"

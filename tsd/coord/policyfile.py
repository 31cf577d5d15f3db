"""Where the policy comes from: a file that is watched, or a text in the store; the default allows everything."""

from __future__ import annotations

import logging
from pathlib import Path

from tsd.base.errors import ConfigError
from tsd.base.log import fields
from tsd.coord.policy.hujson import PolicyError
from tsd.coord.policy.load import load
from tsd.coord.policy.model import DEFAULT_POLICY, Policy

log = logging.getLogger("tsd.coord.policy")

DEFAULT_TEXT = """// The default: every node may reach every other.
{
  "acls": [{"action": "accept", "src": ["*"], "dst": ["*:*"]}],
}
"""


def read_policy(path: Path) -> tuple[str, Policy]:
    """Text and policy of a file. Raises `ConfigError` with `FILE:LINE:COLUMN: what`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"policy {path}: {err.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"policy {path}: not UTF-8 text") from None
    try:
        return text, load(text)
    except PolicyError as err:
        raise ConfigError(f"{path}:{err}") from None


class PolicySource:
    """`file` wins over `text`, the text kept in the store."""

    def __init__(self, file: Path | None, text: str | None) -> None:
        self.file = file
        self.text = text if text is not None else DEFAULT_TEXT
        self._stamp: tuple[int, int, int] | None = None

    def load_first(self) -> Policy:
        """At start a broken policy is an error: nothing older could stay in force. Raises `ConfigError`."""
        if self.file is not None:
            self._stamp = self._stat()
            self.text, policy = read_policy(self.file)
            return policy
        try:
            return load(self.text) if self.text != DEFAULT_TEXT else DEFAULT_POLICY
        except PolicyError as err:
            raise ConfigError(f"stored policy:{err}") from None

    def reload(self, *, only_if_changed: bool) -> Policy | None:
        """The new policy, or None when there is none (unchanged, no file, or broken: then logged)."""
        if self.file is None:
            return None
        stamp = self._stat()
        if only_if_changed and (stamp is None or stamp == self._stamp):
            return None
        self._stamp = stamp
        try:
            self.text, policy = read_policy(self.file)
        except ConfigError as err:
            log.error(fields("policy not reloaded, the old one stays in force", reason=err))
            return None
        log.info(fields("policy reloaded", file=self.file))
        return policy

    def replace(self, text: str) -> Policy:
        """Raises `ConfigError`; `PolicyError` is one."""
        if self.file is not None:
            raise ConfigError(f"the policy comes from {self.file}: edit that file, it is read again when it changes")
        policy = load(text)
        self.text = text
        return policy

    def _stat(self) -> tuple[int, int, int] | None:
        if self.file is None:
            return None
        try:
            found = self.file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

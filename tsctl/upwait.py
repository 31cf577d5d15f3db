"""Waiting for Running after `up`: shows the URL to visit, the reason why it takes long, and the error that ends it."""

from __future__ import annotations

import sys
import time
from typing import Any

from tsctl import context as ctx
from tsctl.client import LocalClient
from tsctl.goflags import Failure
from tsd.localapi.schema import NEEDS_MACHINE_AUTH, RUNNING, STATE_NAMES

QUIET_S = 3.0


class LoginWatcher:
    """Opens the bus when made, before anything is started."""

    def __init__(
        self,
        client: LocalClient,
        *,
        timeout_s: float,
        as_json: bool,
        shows_qr: bool,
        qr_format: str,
        has_auth_key: bool,
        old_url: str,
        old_key: str,
        is_reauth: bool,
    ) -> None:
        self._client = client
        self._as_json = as_json
        self._shows_qr = shows_qr
        self._qr_format = qr_format
        self._has_auth_key = has_auth_key
        self._stale_url = old_url if is_reauth else ""
        self._old_key = old_key
        self._needs_new_key = is_reauth
        self._stream = client.stream("watch-ipn-bus?mask=0")
        self._deadline = time.monotonic() + timeout_s if timeout_s > 0 else None
        self._quiet_until = time.monotonic() + QUIET_S
        self._shown_url = ""
        self._told: list[str] = []
        self._reasons: list[str] = []
        self._has_printed = False
        self._is_running = False

    def close(self) -> None:
        self._stream.close()

    def wait(self) -> None:
        """Until the node runs. Raises Failure."""
        while not self._is_done():
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                self._fail(
                    "timeout waiting for tsd to enter the state Running" + self._reason_note(), state=self._state_now()
                )
            if now >= self._quiet_until and not self._shown_url:
                self._tell_reasons()
            try:
                notify = self._stream.next_json(self._next_wait(now))
            except EOFError:
                self._fail("the daemon went away while we were waiting", state="")
            if notify is not None:
                self._take(notify)
        if self._as_json:
            ctx.out(ctx.to_json({"BackendState": RUNNING}))
        elif self._has_printed:
            ctx.note("Success.")

    def _is_done(self) -> bool:
        return self._is_running and not self._needs_new_key

    def _next_wait(self, now: float) -> float:
        limits = [QUIET_S, *([self._deadline - now] if self._deadline is not None else [])]
        if now < self._quiet_until:
            limits.append(self._quiet_until - now)
        return max(0.01, min(limits))

    def _take(self, notify: dict[str, Any]) -> None:
        if notify.get("ErrMessage"):
            self._fail(f"backend error: {notify['ErrMessage']}", state="")
        health = (notify.get("Health") or {}).get("Warnings")
        if isinstance(health, dict):
            self._reasons = _reasons(health)
        own = notify.get("SelfChange")
        if isinstance(own, dict) and own.get("Key") and own["Key"] != self._old_key:
            self._needs_new_key = False
        if notify.get("BrowseToURL"):
            self._show_url(str(notify["BrowseToURL"]))
        state = notify.get("State")
        if isinstance(state, int) and 0 <= state < len(STATE_NAMES):
            self._is_running = STATE_NAMES[state] == RUNNING
            if STATE_NAMES[state] == NEEDS_MACHINE_AUTH:
                self._show_approval()

    def _show_url(self, url: str) -> None:
        if self._has_auth_key or url in (self._shown_url, self._stale_url):
            return
        self._shown_url = url
        self._has_printed = True
        if self._as_json:
            from tsctl.qr import data_uri

            picture = data_uri(url)
            block = {"AuthURL": url, **({"QR": picture} if picture else {}), "BackendState": "NeedsLogin"}
            ctx.out(ctx.to_json(block, "\t"))
            sys.stdout.flush()
            return
        ctx.note(f"\nTo authenticate, visit:\n\n\t{url}\n")
        if self._shows_qr or sys.stderr.isatty():
            from tsctl.qr import terminal_text

            picture = terminal_text(url, self._qr_format)
            if picture:
                ctx.note(picture)

    def _show_approval(self) -> None:
        self._has_printed = True
        server = str(self._client.prefs().get("ControlURL") or "").rstrip("/")
        if self._as_json:
            ctx.out(ctx.to_json({"AuthURL": server, "BackendState": NEEDS_MACHINE_AUTH}, "\t"))
            sys.stdout.flush()
            return
        ctx.note(f"\nTo approve your machine, visit (as admin):\n\n\t{server}/admin\n")

    def _tell_reasons(self) -> None:
        if self._as_json:
            return
        for reason in self._reasons:
            if reason not in self._told:
                self._told.append(reason)
                ctx.note(f"still waiting: {reason}")
                self._has_printed = True

    def _reason_note(self) -> str:
        reason = self._reasons[0] if self._reasons else self._control_error()
        return f"; last reason: {reason}" if reason else "; `tsctl doctor` may tell why"

    def _control_error(self) -> str:
        """What tsd says of its control server before it becomes a warning; "" from tailscaled."""
        try:
            found = self._client.call("POST", "debug?action=doctor", b"", timeout_s=5.0).json()
        except (Failure, TimeoutError):
            return ""
        return str(found.get("ControlError") or "") if isinstance(found, dict) else ""

    def _state_now(self) -> str:
        try:
            return str(self._client.status(with_peers=False).get("BackendState"))
        except Failure:
            return ""

    def _fail(self, text: str, state: str) -> None:
        if self._as_json:
            ctx.out(ctx.to_json({"BackendState": state, "Error": text}))
            raise Failure(code=1)
        raise Failure(text)


_NOT_REASONS = frozenset(
    ("update-available", "security-update-available", "is-using-unstable-version", "wantrunning-false")
)
_SEVERITIES = ("high", "medium", "low")


def _reasons(warnings: dict[str, Any]) -> list[str]:
    """Warning texts that may explain a wait, the gravest first."""
    found = []
    for code, warning in warnings.items():
        if isinstance(warning, dict) and code not in _NOT_REASONS and code != "warming-up":
            severity = warning.get("Severity")
            rank = _SEVERITIES.index(severity) if severity in _SEVERITIES else len(_SEVERITIES)
            found.append((rank, str(warning.get("Text") or warning.get("Title") or code)))
    return [text for _, text in sorted(found)]

"""What the LocalAPI server asks of the engine. The dicts are JSON objects in Go's spelling (tailscale: `ipn/`).

`LocalBackend` is the seam: the engine implements it, tests use a fake one. `OptionalBackend` answers for the parts an
engine does not have (files, certificates, tailnet lock changes ...), so that an implementation may inherit from it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from tsd.base.errors import TsdError
from tsd.engine.lock.orders import LockOrders
from tsd.hull import Stream

Json = dict[str, Any]


class PrefsError(TsdError):
    """A preference value was refused; the text is shown to the user (400, or the `Error` of check-prefs)."""


class ApiError(TsdError):
    """The call fails with exactly this HTTP status and one line of text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class EtagMismatch(TsdError):
    """The serve config changed since the caller read it."""


class Watch(Protocol):
    """One watch-ipn-bus session; iterating ends when the session is closed or fell behind."""

    session_id: str

    def __aiter__(self) -> AsyncIterator[Json]: ...

    async def __anext__(self) -> Json: ...

    def close(self) -> None: ...


class LocalBackend(Protocol):
    def status(self, with_peers: bool = True) -> Json: ...

    def prefs(self) -> Json: ...

    async def edit_prefs(self, masked: Json) -> Json:
        """Apply the fields whose `...Set` is true; raises PrefsError."""

    async def check_prefs(self, prefs: Json) -> None:
        """Raises PrefsError."""

    async def start(self, options: Json) -> None:
        """Raises TsdError."""

    async def login_interactive(self) -> None: ...

    async def logout(self, reason: str = "") -> None: ...

    async def reset_auth(self) -> None: ...

    def watch(self, mask: int) -> Watch: ...

    async def ping(self, ip: str, kind: str, size: int) -> Json:
        """Waits for the answer however long it takes; cancelled when the caller goes."""

    def whois(self, addr: str, proto: str) -> Json | None: ...

    async def dial(self, network: str, host: str, port: int) -> Stream | str:
        """A stream, or the `ip:port` that the caller shall dial itself. Raises TsdError or OSError."""

    def derp_map(self) -> Json | None: ...

    def dns_config(self) -> Json | None: ...

    def dns_os_config(self) -> Json:
        """Raises TsdError."""

    async def dns_query(self, name: str, qtype: str) -> tuple[bytes, list[Json], Json]:
        """(reply, who could be asked, AnsweredBy with Addr and Transport or Failure in words). Raises `ApiError`."""

    def profiles(self) -> list[Json]: ...

    def current_profile(self) -> Json: ...

    async def new_profile(self) -> None: ...

    async def switch_profile(self, profile_id: str) -> None:
        """Raises KeyError when there is no such profile."""

    async def delete_profile(self, profile_id: str) -> None: ...

    def serve_config(self) -> bytes | None: ...

    async def set_serve_config(self, raw: bytes, if_match: str) -> None:
        """Raises EtagMismatch, or TsdError with the reason."""

    def tka_status(self) -> Json: ...

    def lock(self) -> LockOrders | None:
        """None: no tailnet lock in this daemon."""

    def services(self) -> Json | None:
        """None: no netmap."""

    def node_by_id(self, node_id: int) -> Json | None: ...

    def user_profile(self, user_id: int) -> Json | None: ...

    def user_metrics(self) -> str: ...

    def client_metrics(self) -> str: ...

    async def debug(self, action: str, body: bytes) -> tuple[str, bytes]:
        """(content type, body); KeyError: no such action; ValueError: the body does not decode."""

    def log_tap(self) -> AsyncIterator[Json]: ...

    def operator_user(self) -> str: ...

    def check_ip_forwarding(self) -> str: ...

    def firewall_wiring(self) -> list[str]: ...

    def bugreport(self, note: str) -> str: ...

    def suggest_exit_node(self) -> Json: ...

    def cert_domains(self) -> list[str] | None: ...

    async def query_feature(self, feature: str) -> Json: ...

    async def cert(self, domain: str, kind: str, min_validity_s: float) -> bytes: ...

    async def file_targets(self) -> list[Json]: ...

    async def waiting_files(self, wait_s: float) -> list[Json]: ...

    async def open_file(self, name: str) -> tuple[int, AsyncIterator[bytes]]:
        """(size, contents)."""

    async def delete_file(self, name: str) -> None: ...

    async def put_file(self, node_id: str, name: str, length: int, body: AsyncIterator[bytes]) -> tuple[int, bytes]: ...

    async def reload_config(self) -> bool:
        """Whether there is a configuration file, which was read again. Raises TsdError when it is wrong."""
        ...

    async def shutdown(self) -> None: ...


class OptionalBackend:
    """Answers for what an engine leaves out; every method may be overridden."""

    async def reset_auth(self) -> None:
        raise ApiError(501, "reset-auth is not part of this daemon")

    def lock(self) -> LockOrders | None:
        return None

    def cert_domains(self) -> list[str] | None:
        return None

    async def query_feature(self, feature: str) -> Json:
        return {"Complete": True}

    async def cert(self, domain: str, kind: str, min_validity_s: float) -> bytes:
        raise ApiError(500, "this daemon has no certificate source yet")

    async def file_targets(self) -> list[Json]:
        return []

    async def waiting_files(self, wait_s: float) -> list[Json]:
        return []

    async def open_file(self, name: str) -> tuple[int, AsyncIterator[bytes]]:
        raise ApiError(500, f"no waiting file {name!r}")

    async def delete_file(self, name: str) -> None:
        return None

    async def put_file(self, node_id: str, name: str, length: int, body: AsyncIterator[bytes]) -> tuple[int, bytes]:
        raise ApiError(501, "this daemon does not send files yet (Taildrop)")

    async def reload_config(self) -> bool:
        return False

    def check_ip_forwarding(self) -> str:
        return ""

    def firewall_wiring(self) -> list[str]:
        return []

    def bugreport(self, note: str) -> str:
        return "BUG-NO-LOGS-NO-SUPPORT-this-node-has-had-its-logging-disabled"

    def suggest_exit_node(self) -> Json:
        return {"ID": "", "Name": ""}

    def services(self) -> Json | None:
        return {}

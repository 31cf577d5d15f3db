"""What to say when the coordination server, or something in front of it, does not play along."""

from __future__ import annotations

from tsd.base.entropy import Entropy, uniform
from tsd.base.errors import ControlError
from tsd.transport.http import HttpResponse, UpgradeAnswer
from tsd.ts2021.constants import UPGRADE_PROTOCOL

_NO_REASON = (
    "the server refused the Noise handshake without giving a reason: its key may have changed, or it does not accept"
    " this version (Noise)"
)


class HandshakeRefused(ControlError):
    """The server's key may have changed."""

    def __init__(self, text: str = _NO_REASON) -> None:
        super().__init__(text)


_STATUS_TEXTS = {
    400: "400 Bad Request: a proxy in front of it probably strips the Upgrade header",
    401: "401 Unauthorized: something in front of it wants a login",
    403: "403 Forbidden: a firewall or proxy in front of it blocks the upgrade",
    404: "404 Not Found: no coordination server at this address and path",
    405: "405 Method Not Allowed: a proxy in front of it does not pass POST upgrades (only WebSocket)",
    407: "407 Proxy Authentication Required: put user and password into the proxy variable",
    426: "426 Upgrade Required: a proxy in front of it removed our Upgrade header",
    429: "429 Too Many Requests",
    500: "500 Internal Server Error: the Upgrade header may have been removed on the way",
    502: "502 Bad Gateway: the proxy is up but the coordination server behind it is not",
    503: "503 Service Unavailable: the coordination server is down for now",
    504: "504 Gateway Timeout: the coordination server behind the proxy does not answer",
}


def upgrade_refusal(host: str, answer: UpgradeAnswer) -> ControlError:
    """Why an answer to the ts2021 upgrade is not the 101 that was wanted."""
    status, headers = answer.status, answer.headers
    if status == 101:
        protocol = headers.get("upgrade", "")
        text = f"{host} switched to protocol {protocol!r} instead of {UPGRADE_PROTOCOL!r}"
    elif 300 <= status < 400:
        where = headers.get("location", "nowhere")
        text = f"{host} answered the upgrade with a redirect ({status}) to {where}; use that address as login server"
    elif 200 <= status < 300:
        kind = headers.get("content-type", "no content type").partition(";")[0]
        text = f"{host} answered the upgrade with {status} and {kind}: that is a web site, not a coordination server"
    else:
        text = f"{host} answered the upgrade with {_STATUS_TEXTS.get(status, f'status {status}')}"
    return ControlError(f"{text} (HTTP)", status=status)


def key_refusal(url: str, response: HttpResponse) -> ControlError:
    """Why an answer to `GET /key` is useless."""
    status = response.status
    if 300 <= status < 400:
        where = response.headers.get("location", "nowhere")
        text = f"{url} redirects to {where}; use that address as login server"
    elif status == 200:
        kind = response.headers.get("content-type", "no content type").partition(";")[0]
        text = f"{url} answered with {kind} instead of a key: is this a coordination server?"
    else:
        text = f"{url} answered {_STATUS_TEXTS.get(status, f'status {status}')}"
        if response.text:
            text += f" ({response.text!r})"
    return ControlError(f"{text} (HTTP)", status=status)


def is_upgraded(answer: UpgradeAnswer) -> bool:
    return answer.status == 101 and answer.headers.get("upgrade", "").lower() == UPGRADE_PROTOCOL


def retry_after_s(header: str, wall_ns: int, entropy: Entropy, *, cap_s: float, is_capped: bool) -> float:
    """How long a 429 asks us to wait; nonsense gives 5 to 10 s.

    Longer than `cap_s` is nonsense too, unless `is_capped`: then it is cut to the cap. Some jitter is added, so that
    many clients do not come back at once.
    """
    text = header.strip()
    wanted_s = 0.0
    if text.isascii() and text.isdecimal():
        wanted_s = float(text[:12])
    elif text:
        from email.utils import parsedate_to_datetime  # rarely needed, and slow to load

        try:
            wanted_s = parsedate_to_datetime(text).timestamp() - wall_ns / 1e9
        except (TypeError, ValueError, IndexError, OverflowError):
            wanted_s = 0.0
    if wanted_s > cap_s and is_capped:
        wanted_s = cap_s
    if not 0 < wanted_s <= cap_s:
        return uniform(entropy, 5.0, 10.0)
    return wanted_s + uniform(entropy, 0.0, min(5.0, wanted_s / 10))

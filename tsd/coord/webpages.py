"""Ordinary HTTP of the coordination server: the server key, health, relay admission, the page of a waiting login."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING

from aiohttp import web

from tsd.base.errors import DecodeError
from tsd.tailcfg.mapping import DERPAdmitClientRequest, DERPAdmitClientResponse
from tsd.tailcfg.wire import decode_json, encode_json

if TYPE_CHECKING:
    from tsd.coord.server import CoordServer

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"></head>
<body style="font-family:sans-serif;max-width:40em;margin:3em auto;line-height:1.5"><h1>{title}</h1>{body}</body></html>
"""


def routes(server: CoordServer) -> web.Application:
    pages = _Pages(server)
    app = web.Application(client_max_size=64 << 10)
    app.router.add_get("/key", pages.key)
    app.router.add_get("/health", pages.health)
    app.router.add_get("/derpmap.json", pages.derp_map)
    app.router.add_get("/register/{auth_id}", pages.register)
    app.router.add_post("/verify", pages.verify)
    app.router.add_route("*", "/ts2021", pages.upgrade_required)
    app.router.add_get("/machine/ping-response", pages.ping_response)
    app.router.add_get("/", pages.home)
    return app


class _Pages:
    def __init__(self, server: CoordServer) -> None:
        self._server = server

    async def key(self, request: web.Request) -> web.Response:
        version = request.query.get("v", "")
        if not version.isascii() or not version.isdecimal():
            return web.Response(status=400, text="missing or bad parameter v\n")
        body = {"legacyPublicKey": "mkey:" + "0" * 64, "publicKey": self._server.control_key_text}
        return web.Response(body=encode_json(body), content_type="application/json")

    async def health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "pass"})

    async def derp_map(self, _request: web.Request) -> web.Response:
        """For tools that want a relay map by URL; it says nothing that a STUN or TLS scan would not."""
        body = encode_json(self._server.coordinator.config.derp_map)
        return web.Response(body=body, content_type="application/json")

    async def ping_response(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def upgrade_required(self, _request: web.Request) -> web.Response:
        return web.Response(status=400, text="ts2021 wants POST with Upgrade: tailscale-control-protocol\n")

    async def verify(self, request: web.Request) -> web.Response:
        """Admission for relays elsewhere (derper -verify-client-url)."""
        try:
            asked = decode_json(await request.read(), DERPAdmitClientRequest)
        except DecodeError as err:
            return web.Response(status=400, text=f"{err}\n")
        coordinator = self._server.coordinator
        is_admitted = coordinator.is_admitted(asked.node_public, self._server.moment().wall_ns)
        return web.Response(
            body=encode_json(DERPAdmitClientResponse(allow=is_admitted)), content_type="application/json"
        )

    async def register(self, request: web.Request) -> web.Response:
        """Tells the administrator what to run; approving takes the admin socket, not this page."""
        auth_id = request.match_info["auth_id"]
        if not re.match(r"[a-z2-7]{24}\Z", auth_id):
            return web.Response(status=404, text="not found\n")
        pending = self._server.coordinator.registration.pending.get(auth_id)
        if pending is None:
            body = "<p>This login is finished, or it was given up. Nothing is left to do here.</p>"
            return _page("Nothing waits here", body, status=404)
        hostname = pending.request.hostinfo.hostname if pending.request.hostinfo is not None else ""
        state = self._server.settings.state
        command = f"tsd coord nodes approve --state={state} --user=NAME {auth_id}"
        body = (
            f"<p>The machine <b>{html.escape(hostname) or '(without a name)'}</b> asks to join this tailnet.</p>"
            f"<p>If you are its administrator, run on the machine of the coordination server:</p>"
            f"<pre>{html.escape(command)}</pre>"
            f"<p>The machine goes on by itself as soon as you have.</p>"
        )
        return _page("A machine wants to join", body)

    async def home(self, _request: web.Request) -> web.Response:
        body = f"<p>Join with</p><pre>tsctl up --login-server={html.escape(self._server.url)}</pre>"
        return _page("tsd coordination server", body)


def _page(title: str, body: str, status: int = 200) -> web.Response:
    text = _PAGE.format(title=html.escape(title), body=body)
    headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Cache-Control": "no-store"}
    return web.Response(status=status, text=text, content_type="text/html", headers=headers)

"""The administrator's Unix socket: JSON over HTTP, one POST per command, mode 0600 in the state folder.

Whoever may open the socket is the administrator; there is no other check. Answers are `{"result": …}` or
`{"error": "one line"}` with status 400.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tsd.base.errors import ConfigError, TsdError
from tsd.coord.adminclient import SOCKET_NAME, Arguments, short_path
from tsd.coord.server import CoordServer
from tsd.coord.state.config import SIZE_LIMIT_NODES
from tsd.coord.state.registration import random_text
from tsd.tailcfg.mapping import PingRequest

ECHO_TIMEOUT_S = 10.0

Command = Callable[[Arguments], Awaitable[Any]]


class AdminServer:
    """Serves the socket of one `CoordServer`."""

    def __init__(self, server: CoordServer) -> None:
        self._server = server
        self._runner: web.AppRunner | None = None
        self._folder_fd = -1
        self._path = server.settings.state / SOCKET_NAME
        self._commands: dict[str, Command] = {
            "status": self._status,
            "keys.create": self._keys_create,
            "keys.list": self._keys_list,
            "keys.revoke": self._keys_revoke,
            "nodes.list": self._nodes_list,
            "nodes.pending": self._nodes_pending,
            "nodes.approve": self._nodes_approve,
            "nodes.expire": self._nodes_expire,
            "nodes.rename": self._nodes_rename,
            "nodes.approve-routes": self._nodes_approve_routes,
            "nodes.delete": self._nodes_delete,
            "nodes.echo": self._nodes_echo,
            "users.list": self._users_list,
            "policy.get": self._policy_get,
            "policy.set": self._policy_set,
        }

    async def start(self) -> None:
        """A socket left behind is replaced: the store's lock says that no other server is alive."""
        app = web.Application(client_max_size=4 << 20)
        app.router.add_post("/v1/{command}", self._handle)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        self._path.unlink(missing_ok=True)
        self._folder_fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_mask = os.umask(0o177)
        try:
            sock.bind(short_path(self._path, self._folder_fd))
        except OSError as err:
            sock.close()
            raise ConfigError(f"{self._path}: {err.strerror}") from None
        finally:
            os.umask(old_mask)
        await web.SockSite(self._runner, sock).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._path.unlink(missing_ok=True)
            os.close(self._folder_fd)

    async def _handle(self, request: web.Request) -> web.Response:
        command = self._commands.get(request.match_info["command"])
        if command is None:
            return _failure("unknown command", 404)
        try:
            arguments = json.loads(await request.read() or b"{}")
            if not isinstance(arguments, dict):
                return _failure("arguments must be an object", 400)
            result = await command(arguments)
        except (TsdError, ValueError) as err:
            return _failure(str(err), 400)
        except KeyError as err:
            return _failure(f"argument {err} is missing", 400)
        self._server.drain()
        return web.json_response({"result": result})

    # Commands

    @property
    def _admin(self) -> Any:
        return self._server.administration

    async def _status(self, _arguments: Arguments) -> Any:
        server, registry = self._server, self._server.coordinator.registry
        return {
            "url": server.url,
            "derp": str(server.derp_address or ""),
            "stun": str(server.stun_address or ""),
            "baseDomain": server.settings.base_domain,
            "nodes": len(registry.nodes),
            "online": len(registry.online),
            "sizeLimit": SIZE_LIMIT_NODES,
            "relayClients": len(server.derp.router.keys()) if server.derp is not None else 0,
            "policyFile": str(server.settings.policy_file or ""),
        }

    async def _keys_create(self, arguments: Arguments) -> Any:
        expiry_s = arguments.get("expiry_s", 86400.0)
        return self._admin.create_key(
            self._server.moment(),
            user=str(arguments.get("user") or ""),
            tags=tuple(map(str, arguments.get("tags") or ())),
            reusable=bool(arguments.get("reusable")),
            ephemeral=bool(arguments.get("ephemeral")),
            expiry_s=None if expiry_s is None else float(expiry_s),
        )

    async def _keys_list(self, _arguments: Arguments) -> Any:
        return self._admin.list_keys(self._server.moment())

    async def _keys_revoke(self, arguments: Arguments) -> Any:
        return self._admin.revoke_key(str(arguments["key"]), self._server.moment())

    async def _nodes_list(self, _arguments: Arguments) -> Any:
        return self._admin.list_nodes(self._server.moment())

    async def _nodes_pending(self, _arguments: Arguments) -> Any:
        return self._admin.list_pending()

    async def _nodes_approve(self, arguments: Arguments) -> Any:
        return self._admin.approve(str(arguments["id"]), str(arguments.get("user") or ""), self._server.moment())

    async def _nodes_expire(self, arguments: Arguments) -> Any:
        return self._admin.expire(str(arguments["node"]), self._server.moment())

    async def _nodes_rename(self, arguments: Arguments) -> Any:
        return self._admin.rename(str(arguments["node"]), str(arguments["name"]), self._server.moment())

    async def _nodes_approve_routes(self, arguments: Arguments) -> Any:
        routes = tuple(map(str, arguments["routes"]))
        return self._admin.approve_routes(str(arguments["node"]), routes, self._server.moment())

    async def _nodes_delete(self, arguments: Arguments) -> Any:
        return self._admin.delete(str(arguments["node"]), self._server.moment())

    async def _nodes_echo(self, arguments: Arguments) -> Any:
        """Ask the node to echo through its control connection (c2n)."""
        node = self._admin.find_node(str(arguments["node"]))
        token = random_text(os.urandom, 26)
        reply = self._server.requests.expect_reply(token)
        call = b"POST /echo HTTP/1.1\r\nHost: c2n\r\nContent-Length: 4\r\n\r\necho"
        ping = PingRequest(url=f"https://unused/c2n/{token}", types="c2n", payload=base64.b64encode(call).decode())
        if not self._server.coordinator.send_ping(node.id, ping):
            reply.cancel()
            raise ConfigError(f"{node.label} is offline")
        self._server.drain()
        try:
            raw = await asyncio.wait_for(reply, ECHO_TIMEOUT_S)
        except TimeoutError:
            raise ConfigError(f"{node.label} did not answer within {ECHO_TIMEOUT_S:.0f} s") from None
        return {"node": node.label, "answer": raw.partition(b"\r\n")[0].decode(errors="replace")}

    async def _users_list(self, _arguments: Arguments) -> Any:
        return self._admin.list_users()

    async def _policy_get(self, _arguments: Arguments) -> Any:
        return {"policy": self._server.policy.text, "file": str(self._server.policy.file or "")}

    async def _policy_set(self, arguments: Arguments) -> Any:
        await self._server.set_policy(str(arguments["policy"]))
        return {}


def _failure(text: str, status: int) -> web.Response:
    return web.json_response({"error": text.replace("\n", " ")}, status=status)

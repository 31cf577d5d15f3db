"""Files sent and received (tailscale: `feature/taildrop/localapi.go`). What they mean is the backend's business.

Names are taken from the escaped path and decoded once, so that a name may hold any character but a slash.
"""

from __future__ import annotations

from urllib.parse import unquote

from tsd.localapi.call import Call, Endpoint, Response, compact, empty, text


async def file_targets(call: Call) -> Response:
    return compact(await call.backend.file_targets())


async def files(call: Call) -> Response | None:
    name = unquote(call.path.removeprefix("files/"))
    if not name:
        return await _inbox(call)
    if "/" in name or name in (".", ".."):
        return text(400, "a file name may not hold a slash")
    if call.method == "DELETE":
        await call.backend.delete_file(name)
        return empty()
    size, contents = await call.backend.open_file(name)
    stream = call.start_stream("application/octet-stream", length=size)
    async for piece in contents:
        await stream.send(piece)
    stream.finish()
    return None


async def _inbox(call: Call) -> Response:
    if call.method != "GET":
        return text(405, "want GET to list files")
    wait_text = call.value("waitsec") or "0"
    if not (wait_text.isascii() and wait_text.isdigit()):
        return text(400, "invalid 'waitsec' parameter")
    async with call.connection.until_gone():
        return compact(await call.backend.waiting_files(float(wait_text)) or None)


async def file_put(call: Call) -> Response:
    if call.method != "PUT":
        return text(400, "want PUT to put file")
    node_id, slash, escaped = call.path.removeprefix("file-put/").partition("/")
    name = unquote(escaped)
    if not node_id or not slash or not name or "/" in name:
        return text(400, "want file-put/NODE/NAME")
    status, body = await call.backend.put_file(unquote(node_id), name, call.body.length, call.body)
    return Response(status, body, "text/plain; charset=utf-8")


ENDPOINTS = (
    Endpoint("file-targets", file_targets, methods=("GET",), wrong_method=(400, "want GET to list targets")),
    Endpoint("files/", files, needs_write=True, denied="file access denied"),
    Endpoint("file-put/", file_put, needs_write=True, denied="file access denied"),
)

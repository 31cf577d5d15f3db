"""Login profiles (tailscale: `ipn/localapi`, `profiles/`). Even listing them needs the right to write, as upstream."""

from __future__ import annotations

from urllib.parse import unquote

from tsd.localapi.call import Call, Endpoint, Response, compact, empty, text


async def profiles(call: Call) -> Response:
    """GET the list, PUT a new empty profile, and everything about one of them."""
    name = unquote(call.path.removeprefix("profiles/"))
    if not name:
        return await _collection(call)
    if name == "current":
        return await _current(call)
    return await _single(call, name)


async def _collection(call: Call) -> Response:
    if call.method == "GET":
        return compact(call.backend.profiles())
    if call.method != "PUT":
        return text(405, "use GET or PUT")
    await call.backend.new_profile()
    return empty(201)


async def _current(call: Call) -> Response:
    if call.method != "GET":
        return text(405, "use GET")
    return compact(call.backend.current_profile())


async def _single(call: Call, profile_id: str) -> Response:
    if call.method == "GET":
        found = next((profile for profile in call.backend.profiles() if profile.get("ID") == profile_id), None)
        return text(404, "Profile not found") if found is None else compact(found)
    if call.method == "POST":
        try:
            await call.backend.switch_profile(profile_id)
        except KeyError:
            return text(500, "profile not found")
        return empty()
    if call.method == "DELETE":
        await call.backend.delete_profile(profile_id)
        return empty()
    return text(405, "use GET, POST or DELETE")


ENDPOINTS = (Endpoint("profiles/", profiles, needs_write=True, denied="profiles access denied"),)

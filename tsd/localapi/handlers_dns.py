"""DNS as control configured it, as the host has it, and queries to the node's own resolver."""

from __future__ import annotations

import base64

from tsd.localapi.call import Call, Endpoint, Response, compact, pretty, read_by_writer, text
from tsd.localapi.schema import DNS_QUERY_TYPES


async def dns_config(call: Call) -> Response:
    found = call.backend.dns_config()
    return text(503, "no netmap") if found is None else pretty(found)


async def dns_os_config(call: Call) -> Response:
    return compact(call.backend.dns_os_config())


async def dns_query(call: Call) -> Response:
    name, qtype = call.value("name"), call.value("type").upper() or "A"
    if not name:
        return text(400, "missing 'name' parameter")
    if qtype not in DNS_QUERY_TYPES:
        return text(400, f"unknown DNS message type: {call.value('type')}")
    async with call.connection.until_gone():
        reply, resolvers, told = await call.backend.dns_query(name, qtype)
    found = {"Bytes": base64.b64encode(reply).decode(), "Resolvers": resolvers}
    return compact(found | told)


ENDPOINTS = (
    Endpoint("dns-config", dns_config),
    read_by_writer(
        "dns-osconfig", dns_os_config, denied="dns-osconfig dump access denied", wrong_method=(405, "only GET allowed")
    ),
    read_by_writer(
        "dns-query",
        dns_query,
        denied="dns-query access denied",
        wrong_method=(405, "only GET allowed"),
        method_first=True,
    ),
)

"""Fuzz targets of the Linux hull: what the kernel's TUN hands us, and resolver files that others wrote."""

from __future__ import annotations

from tsd.base.addr import parse_ip
from tsd.dns.osconfig import os_dns
from tsd.hull import DnsConfig
from tsplatform.linux import vnet
from tsplatform.linux.dns import choose, file


def fuzz_vnet(data: bytes) -> None:
    """Ten bytes of virtio header, then a packet, perhaps a super-segment."""
    header, packet = data[: vnet.HEADER_BYTES].ljust(vnet.HEADER_BYTES, b"\0"), data[vnet.HEADER_BYTES :]
    if not packet:
        return
    for frame in vnet.frames_from(header, packet) or ():
        assert len(frame.packet) <= max(len(packet), 65535)
        if frame.segment_bytes and len(frame.packet) >= 40:
            vnet.header_for(frame.packet, frame.segment_bytes & 0xFFFF)


def fuzz_resolv_conf(data: bytes) -> None:
    """A file of any content: its servers are read, and ours is made of it and read again."""
    servers = file.nameservers(data)
    assert all("\n" not in server for server in servers)
    config = DnsConfig(search_domains=("tail.example",), resolvers=("192.0.2.53",))
    wanted = os_dns(config, [parse_ip("100.64.0.1")], False)
    made = file.render(wanted.nameservers, wanted.search, data)
    assert file.is_ours(made) and file.nameservers(made) == ["192.0.2.53"]
    choose.owner_of(data)

"""What a node says about its host (tailscale: tailcfg/tailcfg.go, Hostinfo and NetInfo)."""

from __future__ import annotations

import msgspec

from tsd.tailcfg.wire import Wire, always


class Service(Wire, frozen=True, gc=False):
    """`proto` is tcp, udp, peerapi4, peerapi6 or peerapi-dns-proxy (whose port is always 1)."""

    proto: str = always("")
    port: int = always(0)
    description: str = ""


class NetInfo(Wire, frozen=True, gc=False):
    """What netcheck found; tri-state facts are None while unknown."""

    mapping_varies_by_dest_ip: bool | None = None
    working_ipv6: bool | None = None
    os_has_ipv6: bool | None = None
    working_udp: bool | None = None
    working_icmpv4: bool | None = None
    have_port_map: bool = False
    upnp: bool | None = None
    pmp: bool | None = None
    pcp: bool | None = None
    preferred_derp: int = 0
    link_type: str = ""
    derp_latency: dict[str, float] | None = None
    firewall_mode: str = ""


class Location(Wire, frozen=True, gc=False):
    country: str = ""
    country_code: str = ""
    city: str = ""
    city_code: str = ""
    latitude: float = 0.0
    longitude: float = 0.0
    priority: int = 0


class TPMInfo(Wire, frozen=True, gc=False):
    manufacturer: str = ""
    vendor: str = ""
    model: int = 0
    firmware_version: int = 0
    spec_revision: int = 0
    family_indicator: str = ""


class Hostinfo(Wire, frozen=True, gc=False):
    ipn_version: str = ""
    frontend_log_id: str = msgspec.field(default="", name="FrontendLogID")
    backend_log_id: str = msgspec.field(default="", name="BackendLogID")
    os: str = ""
    os_version: str = ""
    container: bool | None = None
    env: str = ""
    distro: str = ""
    distro_version: str = ""
    distro_code_name: str = ""
    app: str = ""
    desktop: bool | None = None
    package: str = ""
    device_model: str = ""
    push_device_token: str = ""
    hostname: str = ""
    shields_up: bool = False
    sharee_node: bool = False
    no_logs_no_support: bool = False
    remote_config: bool = False
    wire_ingress: bool = False
    ingress_enabled: bool = False
    allows_update: bool = False
    machine: str = ""
    go_arch: str = ""
    go_arch_var: str = ""
    go_version: str = ""
    routable_ips: tuple[str, ...] | None = None
    request_tags: tuple[str, ...] | None = None
    wol_macs: tuple[str, ...] | None = None
    services: tuple[Service, ...] | None = None
    net_info: NetInfo | None = None
    ssh_host_keys: tuple[str, ...] | None = msgspec.field(default=None, name="sshHostKeys")
    cloud: str = ""
    userspace: bool | None = None
    userspace_router: bool | None = None
    app_connector: bool | None = None
    services_hash: str = ""
    peer_relay: bool = False
    exit_node_id: str = ""
    location: Location | None = None
    tpm: TPMInfo | None = None
    state_encrypted: bool | None = None

    def service_port(self, proto: str) -> int:
        """Port of the first service of that protocol; 0 when there is none, or when it is no port."""
        return next((one.port for one in self.services or () if one.proto == proto and 0 <= one.port <= 65535), 0)

#!/bin/sh
# Debian packages that some tests drive (namespaces, packet capture, traffic, a second WireGuard, systemd-analyze, DNS).
# Installed when root; otherwise one line says what is missing, and those tests are skipped.
set -eu

missing=
for pair in ip:iproute2 nft:nftables tshark:tshark wireguard-go:wireguard-go wg:wireguard-tools systemd-analyze:systemd \
    curl:curl rpmbuild:rpm iptables-legacy:iptables ping:iputils-ping dnsmasq:dnsmasq-base dbus-daemon:dbus-daemon iperf3:iperf3; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair##*:}"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    printf 'make test: installing%s\n' "$missing" >&2
    apt-get update -qq </dev/null >/dev/null || true
    for package in $missing; do
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" \
            </dev/null >/dev/null 2>&1 || printf 'make test: %s cannot be installed; its tests are skipped\n' "$package" >&2
    done
else
    printf 'make test: some tests will be skipped; for all of them: sudo apt-get install%s\n' "$missing" >&2
fi

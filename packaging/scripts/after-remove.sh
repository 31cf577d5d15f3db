# action: remove, purge or upgrade. Only a purge takes the identity: /var/lib/tsd holds the keys.
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload >/dev/null 2>&1 || true
fi
if [ "$action" = purge ]; then
    if command -v deb-systemd-helper >/dev/null 2>&1; then
        deb-systemd-helper purge tsd.service >/dev/null || true
    fi
    rm -rf /var/lib/tsd /var/cache/tsd
fi

# action: remove or upgrade. An upgrade leaves the daemon running; it is restarted afterwards.
if [ "$action" = remove ] && [ -d /run/systemd/system ]; then
    if command -v deb-systemd-invoke >/dev/null 2>&1; then
        deb-systemd-invoke stop tsd.service >/dev/null || true
    else
        systemctl --no-reload disable --now tsd.service >/dev/null 2>&1 || true
    fi
fi
# Without systemd, or after a crash that left the host closed.
if [ "$action" = remove ] && [ -e /var/lib/tsd/undo.json ]; then
    /usr/bin/tsd --cleanup --state=/var/lib/tsd/tsd.state --socket=/run/tsd/tsd.sock || true
fi

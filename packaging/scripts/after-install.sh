# action: install or upgrade. systemd is asked where it runs; a container being built has none.
if [ "$action" = install ]; then
    if command -v deb-systemd-helper >/dev/null 2>&1; then
        deb-systemd-helper enable tsd.service >/dev/null || true
    elif command -v systemctl >/dev/null 2>&1; then
        systemctl --no-reload preset tsd.service >/dev/null 2>&1 || true
    fi
elif command -v deb-systemd-helper >/dev/null 2>&1; then
    deb-systemd-helper update-state tsd.service >/dev/null || true
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload >/dev/null 2>&1 || true
    start=start
    if [ "$action" = upgrade ]; then start=restart; fi
    if command -v deb-systemd-invoke >/dev/null 2>&1; then
        deb-systemd-invoke "$start" tsd.service >/dev/null || true
    elif [ "$action" = upgrade ]; then
        systemctl try-restart tsd.service >/dev/null 2>&1 || true
    fi
fi

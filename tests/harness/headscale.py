"""A real headscale in a network namespace, from the folder named by TSD_PEER_BIN.

Users, keys, nodes and the policy are handled with its own CLI over its Unix socket, the way an operator would.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.netlab import NetLab, Process, wait_for

BASE_DOMAIN = "tn.example"
ALLOW_ALL = {"acls": [{"action": "accept", "src": ["*"], "dst": ["*:*"]}]}


def peer_binary(name: str) -> str:
    """Path of a real program; skips the test, saying why, when there is none."""
    folder = os.environ.get("TSD_PEER_BIN", "")
    path = Path(folder) / name
    if not folder or not path.is_file():
        pytest.skip(f"needs {name}: set TSD_PEER_BIN to a folder with the real binaries")
    return str(path)


def derp_region(address: str, port: int = 4443, **changes: Any) -> dict[str, Any]:
    """A region with one node, in headscale's spelling of the fields (Go's names in lower case)."""
    node = {
        "name": "900a", "regionid": 900, "hostname": address, "ipv4": address, "ipv6": "none",
        "derpport": port, "stunport": 3478, "insecurefortests": True,
    }  # fmt: skip
    return {"regionid": 900, "regioncode": "lab", "regionname": "Lab", "nodes": [node | changes]}


class Headscale:
    """`start` it in a namespace of a lab; `url` is what nodes are given as login server."""

    def __init__(
        self,
        lab: NetLab,
        namespace: str,
        folder: Path,
        *,
        port: int = 8080,
        region: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._binary = peer_binary("headscale")
        self._lab = lab
        self._namespace = namespace
        self.folder = folder
        self.address = lab.address(namespace)
        self.url = f"http://{self.address}:{port}"
        self.metrics_url = f"http://127.0.0.1:{port + 1}"
        """Only from inside its namespace."""
        self.log = folder / "headscale.log"
        self.process: Process | None = None
        folder.mkdir(parents=True, exist_ok=True)
        derp = folder / "derp.yaml"
        # JSON is YAML, but for keys that must be numbers.
        derp.write_text(f"regions: {{900: {json.dumps(dict(region or derp_region(self.address)))}}}\n")
        config = self._config(port, derp) | dict(settings or {})
        self.config_path = folder / "config.yaml"
        self.config_path.write_text(json.dumps(config, indent=1))

    def _config(self, port: int, derp: Path) -> dict[str, Any]:
        return {
            "server_url": self.url,
            "listen_addr": f"{self.address}:{port}",
            "metrics_listen_addr": f"127.0.0.1:{port + 1}",
            "noise": {"private_key_path": str(self.folder / "noise.key")},
            "prefixes": {"v4": "100.64.0.0/10", "v6": "fd7a:115c:a1e0::/48", "allocation": "sequential"},
            "derp": {"server": {"enabled": False}, "urls": [], "paths": [str(derp)], "auto_update_enabled": False},
            "disable_check_updates": True,
            "node": {"expiry": 0, "ephemeral": {"inactivity_timeout": "70s"}},
            "database": {"type": "sqlite", "sqlite": {"path": str(self.folder / "db.sqlite")}},
            "policy": {"mode": "database"},
            "dns": {
                "magic_dns": True, "base_domain": BASE_DOMAIN, "override_local_dns": False,
                "nameservers": {"global": [], "split": {}},
            },
            "unix_socket": str(self.folder / "h.sock"),
            "unix_socket_permission": "0700",
            "logtail": {"enabled": False},
            "log": {"level": "debug", "format": "text"},
        }  # fmt: skip

    def start(self) -> Headscale:
        words = [self._binary, "-c", str(self.config_path), "serve"]
        process = self.process = self._lab.start(self._namespace, words, self.log)

        def is_up() -> bool:
            if not process.is_running:
                raise RuntimeError(f"headscale ended:\n{process.tail()}")
            return (self.folder / "h.sock").exists() and self._answers()

        wait_for(is_up, 30, "headscale's start")
        return self

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    def _answers(self) -> bool:
        return (
            subprocess.run(self._words("users", "list"), capture_output=True, check=False, timeout=20).returncode == 0
        )

    def _words(self, *words: str) -> list[str]:
        return [self._binary, "-c", str(self.config_path), *words, "-o", "json"]

    def cli(self, *words: str) -> Any:
        """What `headscale WORDS` prints: parsed JSON, or text where it has no JSON. Raises RuntimeError."""
        done = subprocess.run(self._words(*words), capture_output=True, text=True, check=False, timeout=30)
        if done.returncode != 0:
            raise RuntimeError(f"headscale {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
        try:
            return json.loads(done.stdout)
        except ValueError:
            return done.stdout.strip()

    def create_user(self, name: str) -> int:
        return int(self.cli("users", "create", name)["id"])

    def create_key(
        self,
        user_id: int | None,
        *,
        reusable: bool = False,
        ephemeral: bool = False,
        tags: Sequence[str] = (),
        expiration: str = "1h",
    ) -> str:
        words = ["preauthkeys", "create", "--expiration", expiration]
        words += ["--user", str(user_id)] if user_id is not None else []
        words += ["--reusable"] if reusable else []
        words += ["--ephemeral"] if ephemeral else []
        words += ["--tags", ",".join(tags)] if tags else []
        return str(self.cli(*words)["key"])

    def nodes(self) -> list[dict[str, Any]]:
        return list(self.cli("nodes", "list") or [])

    def node(self, name: str) -> dict[str, Any]:
        """By its given name. Raises LookupError."""
        return next(node for node in self.nodes() if node.get("given_name") == name or node.get("name") == name)

    def approve_login(self, url: str, user: str) -> None:
        """What the page behind an AuthURL would do."""
        self.cli("auth", "register", "--auth-id", url.rstrip("/").rpartition("/")[2], "--user", user)

    def set_policy(self, policy: Mapping[str, Any]) -> None:
        path = self.folder / "policy.hujson"
        path.write_text(json.dumps(policy))
        self.cli("policy", "set", "-f", str(path))

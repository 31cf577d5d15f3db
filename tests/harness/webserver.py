"""A small web server for tests: GET of files, PUT stores them. `python -m harness.webserver PORT FOLDER`."""

from __future__ import annotations

import socket
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        left = int(self.headers.get("Content-Length", "0"))
        target = Path(self.directory) / Path(self.path).name
        with open(target, "wb") as file:
            while left:
                chunk = self.rfile.read(min(left, 1 << 20))
                if not chunk:
                    break
                file.write(chunk)
                left -= len(chunk)
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return None


class Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6
    daemon_threads = True
    request_queue_size = 512

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def main() -> None:
    port, folder = int(sys.argv[1]), sys.argv[2]
    Server(("::", port), lambda *args: Handler(*args, directory=folder)).serve_forever()


if __name__ == "__main__":
    main()

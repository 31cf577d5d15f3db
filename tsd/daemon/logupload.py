"""Log upload for drop-in runs: JSON lines to `$TS_LOG_TARGET`, and the crash text of the run before.

tailscale: logtail (POST `<target>/c/<collection>/<id>`, body a JSON array of objects with `text`). Without the
variable this module is never imported. One thread, a bounded queue, no proxy; a target that does not answer costs
lines, never time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import sys
import threading
import traceback
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tsd.daemon.logsetup import entry_of

COLLECTION = "tailnode.log.tailscale.io"
CRASH_FILE = "tsd.crash.txt"
_QUEUE_LINES = 2000
_BATCH_LINES = 200
_TIMEOUT_S = 5.0
_GATHER_S = 0.05
_BACKOFF_S = (1.0, 5.0, 15.0)


class LogUploader(logging.Handler):
    """Attach to the root logger; `close` sends what is left, for at most two seconds."""

    def __init__(self, target: str, private_id: str) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        parts = urlsplit(target)
        self._secure, self._netloc = parts.scheme == "https", parts.netloc
        self._path = f"{parts.path.rstrip('/')}/c/{COLLECTION}/{private_id}"
        self._queue: deque[dict[str, Any]] = deque(maxlen=_QUEUE_LINES)
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="log-upload", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self.put(entry_of(record, self.format(record)))

    def put(self, entry: dict[str, Any]) -> None:
        self._queue.append(entry)
        self._wake.set()

    def close(self) -> None:
        self._is_closing = True
        self._wake.set()
        self._thread.join(2.0)
        super().close()

    def _run(self) -> None:
        failures = 0
        while not (self._is_closing and not self._queue):
            self._wake.wait()
            if not self._is_closing:
                threading.Event().wait(_GATHER_S)
            self._wake.clear()
            while self._queue:
                if self._send_some():
                    failures = 0
                    continue
                if self._is_closing:
                    return
                self._wake.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                self._wake.clear()
                failures += 1

    def _send_some(self) -> bool:
        batch = [self._queue[i] for i in range(min(len(self._queue), _BATCH_LINES))]
        body = json.dumps(batch, ensure_ascii=False, separators=(",", ":")).encode()
        if not self._post(body):
            return False
        for entry in batch:
            if self._queue and self._queue[0] is entry:
                self._queue.popleft()
        return True

    def _post(self, body: bytes) -> bool:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._netloc, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", self._path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            return response.status < 500
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def start(target: str, logs_dir: str) -> LogUploader:
    """Upload from now on, beginning with the crash that the run before may have left."""
    uploader = LogUploader(target, os.urandom(32).hex())
    for text in take_crash(logs_dir):
        uploader.put({"text": text})
    logging.getLogger().addHandler(uploader)
    return uploader


def take_crash(logs_dir: str) -> list[str]:
    """The stored crash text, if any; it is gone afterwards."""
    if not logs_dir:
        return []
    path = Path(logs_dir) / CRASH_FILE
    try:
        text = path.read_text(errors="replace")
        path.unlink()
    except OSError:
        return []
    return [text]


def keep_crashes(logs_dir: str) -> None:
    """From now on an exception that ends the process is written to `logs_dir` for the next run to upload."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = f"panic: {error}\n\n" + "".join(traceback.format_exception(kind, error, trace))
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        with contextlib.suppress(OSError):
            Path(logs_dir).mkdir(parents=True, exist_ok=True)
            (Path(logs_dir) / CRASH_FILE).write_text(text)

    sys.excepthook = hook

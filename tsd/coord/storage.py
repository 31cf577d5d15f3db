"""The coordination server's store: one SQLite file, used by one worker thread, one JSON document per record.

Every `save` is one transaction that is durable (synchronous FULL) when it returns. A row that does not decode is left
out with a log line, so that one damaged node does not take the tailnet down.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tsd.base.errors import ConfigError, DecodeError, StateError, reason_of
from tsd.base.log import fields
from tsd.coord.state.events import Save
from tsd.coord.state.records import AuthKey, NodeRecord, User, decode_record

log = logging.getLogger("tsd.coord.storage")

T = TypeVar("T")

SCHEMA_VERSION = 1
TABLES = ("users", "auth_keys", "nodes")
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB NOT NULL)",
    *(f"CREATE TABLE IF NOT EXISTS {table} (id INTEGER PRIMARY KEY, document BLOB NOT NULL)" for table in TABLES),
)


@dataclass(slots=True)
class Stored:
    """Everything at start; `last_ids` are the highest IDs ever seen, also of rows that did not decode."""

    users: list[User] = field(default_factory=list)
    auth_keys: list[AuthKey] = field(default_factory=list)
    nodes: list[NodeRecord] = field(default_factory=list)
    last_ids: dict[str, int] = field(default_factory=dict)


class Storage:
    """`folder` is made when missing, with mode 0700. Only one process can have it open.

    Without a thread it blocks the loop for each transaction and is not durable: for simulations in virtual time.
    """

    def __init__(self, folder: Path, *, has_thread: bool = True) -> None:
        self.folder = folder
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="coord-store") if has_thread else None
        self._db: sqlite3.Connection | None = None
        self._lock_fd = -1

    async def open(self) -> None:
        """Raises `ConfigError` when the folder is in use, `StateError` when it cannot be read or written."""
        await self._run(self._open)

    async def load(self) -> Stored:
        return await self._run(self._load)

    async def save(self, saves: Iterable[Save]) -> None:
        batch = list(saves)
        await self._run(lambda: self._save(batch))

    async def meta(self, name: str) -> bytes | None:
        return await self._run(lambda: self._meta(name))

    async def set_meta(self, name: str, value: bytes | None) -> None:
        await self._run(lambda: self._set_meta(name, value))

    async def close(self) -> None:
        await self._run(self._close)
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            if self._executor is None:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except (sqlite3.Error, OSError) as err:
            raise StateError(f"{self.folder}: {reason_of(err)}") from None

    # In the worker thread

    def _connection(self) -> sqlite3.Connection:
        assert self._db is not None, "storage is not open"
        return self._db

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = os.open(self.folder / "coord.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another tsd coord is running with the state folder {self.folder}") from None
        path = self.folder / "coord.db"
        if path.exists() and not path.stat().st_size:
            raise StateError(
                f"{path} is empty (0 bytes), as after a crash of the machine, and no new tailnet is begun in its place;"
                " restore it from a backup, or delete it to begin a new tailnet, which all nodes have to join"
            )
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(path, check_same_thread=False)
        self._db = db
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA synchronous={'OFF' if self._executor is None else 'FULL'}")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise StateError(f"{path} was written by a newer tsd (schema {version}); use that one")
        with db:
            for statement in _SCHEMA:
                db.execute(statement)
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _load(self) -> Stored:
        stored = Stored()
        found: list[tuple[str, type[User] | type[AuthKey] | type[NodeRecord], list[object]]] = [
            ("users", User, stored.users),  # type: ignore[list-item]
            ("auth_keys", AuthKey, stored.auth_keys),  # type: ignore[list-item]
            ("nodes", NodeRecord, stored.nodes),  # type: ignore[list-item]
        ]
        for table, kind, records in found:
            stored.last_ids[table] = int(self._meta(f"last_id.{table}") or b"0")
            for row_id, document in self._connection().execute(f"SELECT id, document FROM {table} ORDER BY id"):
                stored.last_ids[table] = max(stored.last_ids[table], row_id)
                raw = document.encode() if isinstance(document, str) else bytes(document)
                try:
                    records.append(decode_record(raw, kind))
                except DecodeError as err:
                    log.warning(fields("record left out", table=table, id=row_id, reason=err.reason))
        return stored

    def _save(self, saves: list[Save]) -> None:
        db = self._connection()
        with db:
            for one in saves:
                if one.document is None:
                    db.execute(f"DELETE FROM {one.table} WHERE id=?", (one.key,))
                    self._remember_id(db, one)
                else:
                    db.execute(f"INSERT OR REPLACE INTO {one.table} VALUES (?, ?)", (one.key, one.document))

    def _remember_id(self, db: sqlite3.Connection, one: Save) -> None:
        """IDs are never used twice, even when the newest node is deleted before a restart."""
        name = f"last_id.{one.table}"
        if one.key > int(self._meta(name) or b"0"):
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, str(one.key).encode()))

    def _meta(self, name: str) -> bytes | None:
        row = self._connection().execute("SELECT value FROM meta WHERE name=?", (name,)).fetchone()
        return None if row is None else bytes(row[0])

    def _set_meta(self, name: str, value: bytes | None) -> None:
        with self._connection() as db:
            if value is None:
                db.execute("DELETE FROM meta WHERE name=?", (name,))
            else:
                db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

"""Giving names back as they were before a daemon that was killed; at every start and for `tsd --cleanup`."""

from __future__ import annotations

import logging
from pathlib import Path

from tsd.base.errors import HullError
from tsplatform.linux.dns import debian, file, openresolv, tools
from tsplatform.linux.dns.claim import claim_names
from tsplatform.linux.dns.manager import Mode
from tsplatform.linux.hostnames import TakenError

log = logging.getLogger(__name__)


def undo_names(folder: Path) -> None:
    """Never raises. Nothing is done while a daemon of this host has names set up."""
    try:
        claim = claim_names(folder)
        try:
            _undo(folder)
        finally:
            claim.close()
    except TakenError as err:
        log.info("names are left alone: %s", err.reason)
    except HullError as err:
        log.warning("left over on this host: %s", err)


def _undo(folder: Path) -> None:
    for started in (folder / tools.UNDO_NAME, debian.HOOK):
        file.drop_unfinished(started)
    if file.restore(folder / file.BACKUP_NAME):
        log.info("given back as it was before a daemon that was killed: %s", file.PATH)
    left = tools.noted(folder)
    if left is None:
        return
    mode, record = left
    try:
        (debian.undo if mode == Mode.DEBIAN_RESOLVCONF.value else openresolv.undo)(record)
        log.info("given back as it was before a daemon that was killed: the records of resolvconf")
    finally:
        tools.forget(folder)

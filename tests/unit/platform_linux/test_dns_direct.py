"""resolv.conf: what we write, what comes back, tramples, crashes, owners."""

from __future__ import annotations

import os
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from tsd.base.errors import HullError
from tsd.hull import DnsConfig
from tsplatform.linux import dns_direct
from tsplatform.linux.dns_direct import BACKUP_NAME, FIGHT_LIMIT, DirectDns, manager_of, nameservers, render, restore

V4, V6 = ip_address("100.64.0.1"), ip_address("fd7a:115c:a1e0::1")
ORIGINAL = b"; dhcp\nnameserver 192.0.2.53\nsearch lan\noptions timeout:1\n"
MAGIC = DnsConfig(routes={"tn.example": ()}, search_domains=("tn.example",))


class Bed:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "state"
        self.folder.mkdir()
        self.path = folder / "etc" / "resolv.conf"
        self.path.parent.mkdir()
        self.path.write_bytes(ORIGINAL)
        self.dns = DirectDns(self.folder, lambda: [V4, V6], self.path, lambda path: False)
        self.told: list[str] = []
        self.dns.on_fight = self.told.append


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    monkeypatch.setattr(dns_direct, "NAMES_CLAIM", f"test.{os.getpid()}")
    made = Bed(tmp_path)
    yield made
    made.dns.revert()


def test_we_answer_and_keep_search_and_options(bed: Bed) -> None:
    bed.dns.apply(MAGIC)
    lines = bed.path.read_text().splitlines()
    assert lines[1:] == ["nameserver 100.100.100.100", "search tn.example lan", "options timeout:1"]
    assert bed.dns.base_resolvers() == ["192.0.2.53"]
    bed.dns.revert()
    assert bed.path.read_bytes() == ORIGINAL and list(bed.folder.iterdir()) == []
    assert os.listdir(bed.path.parent) == ["resolv.conf"]
    bed.dns.revert()


@pytest.mark.parametrize(
    ("config", "own", "servers"),
    [
        (MAGIC, [V4, V6], ["100.100.100.100"]),
        (MAGIC, [V6], ["fd7a:115c:a1e0::53"]),
        (DnsConfig(resolvers=("1.1.1.1", "9.9.9.9")), [V4], ["1.1.1.1", "9.9.9.9"]),
        (DnsConfig(resolvers=("https://dns.example/q",)), [V4], ["100.100.100.100"]),
        (DnsConfig(resolvers=("1.1.1.1",), routes={"corp": ("10.0.0.1",)}), [V4], ["100.100.100.100"]),
    ],
)
def test_which_servers(config: DnsConfig, own: list[object], servers: list[str]) -> None:
    text = render(config, b"", own)  # type: ignore[arg-type]
    assert [line.split()[1] for line in text.decode().splitlines() if line.startswith("nameserver")] == servers


@pytest.mark.parametrize(
    "config", [DnsConfig(), DnsConfig(routes={"x": ()}, wants_os_config=False), DnsConfig(hosts={"a": (V4,)})]
)
def test_nothing_to_answer_leaves_the_file_alone(bed: Bed, config: DnsConfig) -> None:
    bed.dns.apply(MAGIC)
    bed.dns.apply(config)
    assert bed.path.read_bytes() == ORIGINAL


def test_no_file_before_is_no_file_after(bed: Bed) -> None:
    bed.path.unlink()
    bed.dns.apply(MAGIC)
    assert bed.path.exists()
    bed.dns.revert()
    assert not bed.path.exists()


def test_a_symlink_comes_back_as_one(bed: Bed) -> None:
    target = bed.path.with_name("real.conf")
    bed.path.rename(target)
    bed.path.symlink_to("real.conf")
    bed.dns.apply(MAGIC)
    assert not bed.path.is_symlink() and target.read_bytes() == ORIGINAL
    bed.dns.revert()
    assert os.readlink(bed.path) == "real.conf"


def test_the_mode_comes_back(bed: Bed) -> None:
    bed.path.chmod(0o640)
    bed.dns.apply(MAGIC)
    assert bed.path.stat().st_mode & 0o777 == 0o644
    bed.dns.revert()
    assert bed.path.stat().st_mode & 0o777 == 0o640


def test_a_bind_mount_is_rewritten_in_place(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_direct, "is_mount_point", lambda path: True)
    inode = bed.path.stat().st_ino
    bed.dns.apply(MAGIC)
    bed.dns.revert()
    assert (bed.path.stat().st_ino, bed.path.read_bytes()) == (inode, ORIGINAL)


def test_a_crash_is_undone_by_the_next_start(bed: Bed) -> None:
    bed.dns.apply(MAGIC)
    assert restore(bed.folder / BACKUP_NAME, bed.path)
    assert bed.path.read_bytes() == ORIGINAL
    assert not restore(bed.folder / BACKUP_NAME, bed.path)


def test_after_a_crash_a_file_of_somebody_else_stays(bed: Bed) -> None:
    bed.dns.apply(MAGIC)
    bed.path.write_bytes(b"nameserver 198.51.100.1\n")
    assert restore(bed.folder / BACKUP_NAME, bed.path)
    assert bed.path.read_bytes() == b"nameserver 198.51.100.1\n"


def test_a_damaged_backup_is_said(bed: Bed) -> None:
    (bed.folder / BACKUP_NAME).write_text("{}")
    with pytest.raises(HullError, match="damaged"):
        restore(bed.folder / BACKUP_NAME, bed.path)
    (bed.folder / BACKUP_NAME).unlink()


def test_a_trampled_file_is_put_back_and_theirs_is_what_comes_back_later(bed: Bed) -> None:
    bed.dns.apply(MAGIC)
    ours = bed.path.read_bytes()
    bed.path.write_bytes(b"nameserver 198.51.100.1\n")
    bed.dns.check()
    assert bed.path.read_bytes() == ours
    assert bed.dns.base_resolvers() == ["198.51.100.1"]
    bed.path.unlink()
    bed.dns.check()
    assert bed.path.read_bytes() == ours and bed.told == []


def test_a_fight_ends_and_is_told(bed: Bed) -> None:
    bed.dns.apply(MAGIC)
    for number in range(FIGHT_LIMIT + 3):
        bed.path.write_text(f"nameserver 198.51.100.{number}\n")
        bed.dns.check()
    assert len(bed.told) == 1 and "keeps rewriting" in bed.told[0]
    assert b"198.51.100" in bed.path.read_bytes()
    bed.dns.apply(MAGIC)
    assert b"100.100.100.100" in bed.path.read_bytes()


@pytest.mark.parametrize(
    ("text", "manager"),
    [
        ("# Generated by NetworkManager\nnameserver 192.0.2.1\n", "NetworkManager"),
        ("# This is run by systemd-resolved\n\nnameserver 127.0.0.53\n", "systemd-resolved"),
        ("nameserver 192.0.2.1\n# resolvconf\n", ""),
        ("# Generated by Docker Engine.\nnameserver 192.0.2.1\n", ""),
        (dns_direct.MARKER + "\n", ""),
    ],
)
def test_a_file_of_a_manager_is_left_alone(bed: Bed, text: str, manager: str) -> None:
    bed.path.write_text(text)
    assert manager_of(bed.path) == manager
    if manager:
        with pytest.raises(HullError, match=manager):
            bed.dns.apply(MAGIC)
        assert bed.path.read_text() == text


def test_a_file_of_another_network_is_left_alone(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    dns = DirectDns(bed.folder, lambda: [V4], bed.path, lambda path: True)
    with pytest.raises(HullError, match="shared with another network"):
        dns.apply(MAGIC)
    assert bed.path.read_bytes() == ORIGINAL


def test_only_one_daemon_of_a_host_sets_up_names(bed: Bed) -> None:
    other = DirectDns(bed.folder.parent, lambda: [V4], bed.path, lambda path: False)
    bed.dns.apply(MAGIC)
    with pytest.raises(HullError, match="another tsd"):
        other.apply(MAGIC)
    bed.dns.revert()
    other.apply(MAGIC)
    other.revert()
    assert bed.path.read_bytes() == ORIGINAL


def test_a_folder_that_keeps_nothing_changes_nothing(bed: Bed) -> None:
    dns = DirectDns(bed.folder / "no-such", lambda: [V4], bed.path, lambda path: False)
    with pytest.raises(HullError, match="keep"):
        dns.apply(MAGIC)
    dns.revert()
    assert bed.path.read_bytes() == ORIGINAL


def test_service_addresses_are_never_upstreams() -> None:
    text = b"nameserver 100.100.100.100\nnameserver fd7a:115c:a1e0::53\nnameserver ::1\nnameserver x\nnameserver\n"
    assert nameservers(text) == ["::1"]


def test_what_a_killed_daemon_had_begun_to_write_goes_away(tmp_path: Path) -> None:
    begun = [tmp_path / ".resolv.conf.undo.tsd-7", tmp_path / ".resolv.conf.tsd-7"]
    for path in begun:
        path.write_text("half")
    assert not restore(tmp_path / "resolv.conf.undo", tmp_path / "resolv.conf")
    assert not any(path.exists() for path in begun)

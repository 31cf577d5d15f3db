"""Names on a host whose resolver file nobody manages: what we write, what comes back, tramples, crashes, fights."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from tsd.base.errors import HullError
from tsd.hull import DnsConfig
from tsplatform.linux import programs
from tsplatform.linux.dns import choose, claim, debian, file, keeper, system, tools, undo
from tsplatform.linux.dns.keeper import FIGHT_LIMIT
from tsplatform.linux.dns.system import SystemNames

V4, V6 = ip_address("100.64.0.1"), ip_address("fd7a:115c:a1e0::1")
ORIGINAL = b"; dhcp\nnameserver 192.0.2.53\nsearch lan\noptions timeout:1\n"
MAGIC = DnsConfig(routes={"tn.example": ()}, search_domains=("tn.example",), magic_suffix="tn.example")


class NoManager(choose.HostSurveyor):
    """A host without D-Bus and resolvconf."""

    async def resolved_answers(self) -> bool:
        return False

    network_manager_answers = resolved_answers

    def resolvconf_flavour(self) -> str:
        return ""

    def nsswitch(self) -> str:
        return "hosts: files dns\n"


def eventually(condition: Callable[[], object], what: str = "", limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Bed:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "state"
        self.folder.mkdir(parents=True)
        self.path = folder / "etc" / "resolv.conf"
        self.path.parent.mkdir()
        self.path.write_bytes(ORIGINAL)
        self.told: list[str] = []
        self.names = self.new_names()

    def noted(self) -> list[str]:
        """What is kept; the lock of the folder stays for good."""
        return [name for name in os.listdir(self.folder) if name != ".names.lock"]

    def new_names(self, folder: Path | None = None, is_foreign: bool = False) -> SystemNames:
        kept = folder or self.folder
        made = SystemNames(
            kept,
            "lo",
            lambda: [V4, V6],
            self.path,
            lambda path: is_foreign,
            lambda bus: NoManager(bus, kept / file.BACKUP_NAME, self.path),
        )
        made.on_fight = self.told.append
        return made


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    monkeypatch.setattr(claim, "NAMES_CLAIM", f"test.{os.getpid()}")
    monkeypatch.setattr(system, "PATIENCE_S", 10.0)
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent/bus")
    made = Bed(tmp_path)
    yield made
    made.names.revert()


def test_we_answer_and_keep_search_and_options(bed: Bed) -> None:
    bed.names.apply(MAGIC)
    lines = bed.path.read_text().splitlines()
    assert lines[1:] == [
        "nameserver 100.100.100.100",
        "nameserver fd7a:115c:a1e0::53",
        "search tn.example lan",
        "options timeout:1",
    ]
    assert bed.names.base_resolvers() == ["192.0.2.53"]
    told = bed.names.describe()
    assert told["Mode"] == "direct" and "resolv.conf names nobody as its writer" in told["Because"]
    assert told["Nameservers"][0] == "100.100.100.100" and told["Trouble"] == ""
    bed.names.revert()
    assert bed.path.read_bytes() == ORIGINAL and bed.noted() == []
    assert os.listdir(bed.path.parent) == ["resolv.conf"]
    bed.names.revert()
    assert bed.names.describe()["Mode"] == ""


def test_a_file_deleted_meanwhile_is_written_again_and_comes_back(bed: Bed) -> None:
    bed.names.apply(MAGIC)
    bed.path.unlink()
    eventually(bed.path.exists, "our file again")
    bed.names.revert()
    assert bed.path.read_bytes() == ORIGINAL


@pytest.mark.parametrize(
    "config", [DnsConfig(), DnsConfig(routes={"x": ()}, wants_os_config=False), DnsConfig(hosts={"a": (V4,)})]
)
def test_nothing_to_answer_leaves_the_file_alone(bed: Bed, config: DnsConfig) -> None:
    bed.names.apply(config)
    assert bed.path.read_bytes() == ORIGINAL
    bed.names.apply(MAGIC)
    bed.names.apply(config)
    assert bed.path.read_bytes() == ORIGINAL


def test_no_file_before_is_no_file_after(bed: Bed) -> None:
    bed.path.unlink()
    bed.names.apply(MAGIC)
    assert bed.path.exists()
    bed.names.revert()
    assert not bed.path.exists()


def test_a_symlink_comes_back_as_one(bed: Bed) -> None:
    target = bed.path.with_name("real.conf")
    bed.path.rename(target)
    bed.path.symlink_to("real.conf")
    bed.names.apply(MAGIC)
    assert not bed.path.is_symlink() and target.read_bytes() == ORIGINAL
    bed.names.revert()
    assert os.readlink(bed.path) == "real.conf"


def test_what_the_owner_of_a_link_writes_meanwhile_counts(bed: Bed) -> None:
    """NetworkManager, dhcpcd and connman write a file of their own that /etc/resolv.conf leads to."""
    target = bed.path.with_name("real.conf")
    bed.path.rename(target)
    bed.path.symlink_to("real.conf")
    bed.names.apply(MAGIC)
    target.write_text("nameserver 198.51.100.53\nsearch elsewhere\n")
    assert bed.names.base_resolvers() == ["198.51.100.53"]
    bed.names.check()
    eventually(lambda: "search tn.example elsewhere" in bed.path.read_text(), "the new search domain")
    assert not bed.told
    bed.names.revert()
    assert os.readlink(bed.path) == "real.conf"


def test_search_and_options_of_somebody_who_wrote_meanwhile_are_taken_over(bed: Bed) -> None:
    bed.names.apply(MAGIC)
    bed.path.write_text("nameserver 198.51.100.53\nsearch elsewhere\noptions ndots:2\n")
    eventually(lambda: file.is_ours(bed.path.read_bytes()), "ours again")
    assert bed.path.read_text().splitlines()[3:] == ["search tn.example elsewhere", "options ndots:2"]


@pytest.mark.parametrize("content", [b"", b"# nothing yet\n", b"search lan\n", None])
def test_without_a_nameserver_the_one_of_this_machine_is_asked(bed: Bed, content: bytes | None) -> None:
    bed.path.unlink()
    if content is not None:
        bed.path.write_bytes(content)
    assert bed.names.base_resolvers() == ["127.0.0.1"]
    bed.names.apply(MAGIC)
    assert bed.names.base_resolvers() == ["127.0.0.1"]


def test_an_immutable_file_is_named_with_the_way_out_and_told_once(
    bed: Bed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LOOK_S", 0.1)
    monkeypatch.setattr(keeper, "RETRY_S", 0.1)
    bed.names.apply(MAGIC)
    bed.path.write_bytes(ORIGINAL)
    if subprocess.run(["chattr", "+i", bed.path], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no immutable files, or chattr is missing")
    try:
        eventually(lambda: any(f"chattr -i {bed.path}" in text for text in bed.told), "the trouble")
        time.sleep(1.0)
        assert len([r for r in caplog.records if "putting ours back" in r.message]) <= 1
        assert bed.path.read_bytes() == ORIGINAL
    finally:
        subprocess.run(["chattr", "-i", bed.path], check=True)
    eventually(lambda: file.is_ours(bed.path.read_bytes()), "ours again")
    eventually(lambda: bed.told[-1] == "", "the end of it")


def test_the_mode_comes_back(bed: Bed) -> None:
    bed.path.chmod(0o640)
    bed.names.apply(MAGIC)
    assert bed.path.stat().st_mode & 0o777 == 0o644
    bed.names.revert()
    assert bed.path.stat().st_mode & 0o777 == 0o640


def test_d08_a_bind_mount_is_rewritten_in_place(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "is_mount_point", lambda path: True)
    inode = bed.path.stat().st_ino
    bed.names.apply(MAGIC)
    bed.names.revert()
    assert (bed.path.stat().st_ino, bed.path.read_bytes()) == (inode, ORIGINAL)


def test_d12_a_crash_is_undone_by_the_next_start(bed: Bed) -> None:
    bed.names.apply(MAGIC)
    assert file.restore(bed.folder / file.BACKUP_NAME, bed.path)
    assert bed.path.read_bytes() == ORIGINAL
    assert not file.restore(bed.folder / file.BACKUP_NAME, bed.path)


def test_what_a_killed_daemon_had_begun_to_write_goes_away(bed: Bed) -> None:
    left = [bed.folder / f".{file.BACKUP_NAME}.tsd-7", bed.path.with_name(".resolv.conf.tsd-7")]
    for path in left:
        path.touch()
    assert not file.restore(bed.folder / file.BACKUP_NAME, bed.path)
    assert not any(path.exists() for path in left) and bed.path.read_bytes() == ORIGINAL


def test_so_does_what_it_had_begun_for_resolvconf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "restore", lambda backup: False)
    monkeypatch.setattr(claim, "NAMES_CLAIM", f"test.{os.getpid()}")
    monkeypatch.setattr(debian, "HOOK", tmp_path / "hooks/tsd")
    left = [tmp_path / f".{tools.UNDO_NAME}.tsd-7", tmp_path / "hooks/.tsd.tsd-7"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    undo.undo_names(tmp_path)
    assert not any(path.exists() for path in left)


def test_after_a_crash_a_file_of_somebody_else_stays(bed: Bed) -> None:
    bed.names.apply(MAGIC)
    bed.path.write_bytes(b"nameserver 198.51.100.1\n")
    assert file.restore(bed.folder / file.BACKUP_NAME, bed.path)
    assert bed.path.read_bytes() == b"nameserver 198.51.100.1\n"


@pytest.mark.parametrize("kind", ["file", "symlink", "nothing"])
def test_a_file_that_went_missing_comes_back(bed: Bed, kind: str) -> None:
    if kind != "file":
        bed.path.unlink()
    if kind == "symlink":
        bed.path.symlink_to("gone.conf")
    bed.names.apply(MAGIC)
    bed.path.unlink()
    assert file.restore(bed.folder / file.BACKUP_NAME, bed.path)
    before = {"file": file.Before(ORIGINAL), "symlink": file.Before(None, "gone.conf"), "nothing": file.Before()}
    assert file.look(bed.path) == before[kind]
    assert not (bed.folder / file.BACKUP_NAME).exists()


def test_a_symlink_of_somebody_else_that_leads_nowhere_stays(bed: Bed) -> None:
    bed.names.apply(MAGIC)
    bed.path.unlink()
    bed.path.symlink_to("theirs.conf")
    assert file.restore(bed.folder / file.BACKUP_NAME, bed.path)
    assert os.readlink(bed.path) == "theirs.conf"


def test_a_damaged_backup_is_said(bed: Bed) -> None:
    (bed.folder / file.BACKUP_NAME).write_text("{}")
    with pytest.raises(HullError, match="damaged"):
        file.restore(bed.folder / file.BACKUP_NAME, bed.path)
    (bed.folder / file.BACKUP_NAME).unlink()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_trampled_file_is_put_back_and_theirs_is_what_comes_back_later(bed: Bed, in_place: bool) -> None:
    bed.names.apply(MAGIC)
    ours = bed.path.read_bytes()
    theirs = b"nameserver 198.51.100.1\nsearch tn.example lan\noptions timeout:1\n"
    if in_place:
        bed.path.write_bytes(theirs)
    else:
        other = bed.path.with_name("new")
        other.write_bytes(theirs)
        other.rename(bed.path)
    eventually(lambda: bed.path.read_bytes() == ours, "not put back")
    assert bed.names.base_resolvers() == ["198.51.100.1"]
    bed.path.unlink()
    eventually(lambda: bed.path.exists() and b"100.100.100.100" in bed.path.read_bytes(), "not made again")
    assert not any(bed.told)


def test_a_fight_is_told_with_the_name_of_the_other_and_goes_on_slowly(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LOOK_S", 0.05)
    bed.names.apply(MAGIC)
    for number in range(FIGHT_LIMIT):
        bed.path.write_text(f"# Generated by NetworkManager\nnameserver 198.51.100.{number}\n")
        eventually(lambda: b"100.100.100.100" in bed.path.read_bytes(), str(number))
    bed.path.write_text("# Generated by NetworkManager\nnameserver 198.51.100.99\n")
    eventually(lambda: any(bed.told), "not told")
    assert "NetworkManager keeps changing" in bed.told[-1] and b"198.51.100.99" in bed.path.read_bytes()
    assert "NetworkManager" in bed.names.describe()["Trouble"]
    monkeypatch.setattr(keeper, "TRUCE_S", 0.3)
    eventually(lambda: b"100.100.100.100" in bed.path.read_bytes(), "given up")
    eventually(lambda: bed.told[-1] == "", "the end was not told")


def test_a_file_that_leads_to_resolved_stays_its_own(bed: Bed) -> None:
    """Installed while we run: from then on resolved keeps the settings, and its file is not touched again."""
    bed.names.apply(MAGIC)
    bed.path.unlink()
    bed.path.symlink_to("/run/systemd/resolve/stub-resolv.conf")
    eventually(lambda: bed.names.describe()["Mode"] == "systemd-resolved", "mode")
    eventually(lambda: any(bed.told), "nobody was told that it does not answer")
    bed.names.revert()
    assert os.readlink(bed.path) == "/run/systemd/resolve/stub-resolv.conf"
    assert bed.noted() == []


def test_a_file_of_another_network_is_left_alone(bed: Bed) -> None:
    names = bed.new_names(is_foreign=True)
    with pytest.raises(HullError, match="shared with another network"):
        names.apply(MAGIC)
    names.revert()
    assert bed.path.read_bytes() == ORIGINAL


def test_only_one_daemon_of_a_host_sets_up_names(bed: Bed) -> None:
    other = bed.new_names(bed.folder.parent)
    bed.names.apply(MAGIC)
    with pytest.raises(HullError, match="another tsd"):
        other.apply(MAGIC)
    bed.names.revert()
    other.apply(MAGIC)
    other.revert()
    assert bed.path.read_bytes() == ORIGINAL


def test_who_had_to_wait_takes_over_and_says_so_once(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "RETRY_S", 0.1)
    other = bed.new_names(bed.folder.parent)
    bed.names.apply(MAGIC)
    with pytest.raises(HullError, match="another tsd"):
        other.apply(MAGIC)
    time.sleep(0.5)
    bed.names.revert()
    eventually(lambda: other.describe()["Mode"] == "direct", "not taken over")
    assert not [record for record in caplog.records if "another tsd" in record.getMessage()]
    other.revert()
    assert bed.path.read_bytes() == ORIGINAL


def test_daemons_of_two_networks_do_not_keep_two_files_in_one_folder(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would take the other's note for its own, and the next start would give back the wrong file."""
    bed.names.apply(MAGIC)
    kept = (bed.folder / file.BACKUP_NAME).read_bytes()
    monkeypatch.setattr(claim, "NAMES_CLAIM", f"test.{os.getpid()}.elsewhere")
    elsewhere = Bed(tmp_path / "elsewhere")
    other = elsewhere.new_names(bed.folder)
    with pytest.raises(HullError, match=f"process {os.getpid()}, keeps its own in .*--statedir"):
        other.apply(MAGIC)
    undo.undo_names(bed.folder)
    other.revert()
    assert (bed.folder / file.BACKUP_NAME).read_bytes() == kept and elsewhere.path.read_bytes() == ORIGINAL
    bed.names.revert()
    assert bed.path.read_bytes() == ORIGINAL
    other.apply(MAGIC)
    assert file.is_ours(elsewhere.path.read_bytes())
    other.revert()
    assert elsewhere.path.read_bytes() == ORIGINAL


def test_a_folder_that_keeps_nothing_changes_nothing(bed: Bed) -> None:
    names = bed.new_names(bed.folder / "no-such")
    with pytest.raises(HullError, match="keep"):
        names.apply(MAGIC)
    names.revert()
    assert bed.path.read_bytes() == ORIGINAL


def test_service_addresses_are_never_upstreams() -> None:
    text = b"nameserver 100.100.100.100\nnameserver fd7a:115c:a1e0::53\nnameserver ::1\nnameserver x\nnameserver\n"
    assert file.nameservers(text) == ["::1"]


def test_d14_the_search_line_stays_within_what_libc_reads() -> None:
    domains = [f"d{number}.{'x' * 60}.example" for number in range(40)]
    made = file.render(["192.0.2.1"], domains, b"search lan\n").decode().splitlines()
    assert len(made[-1]) <= len("search ") + 1024 and made[-1].split()[1:4] == domains[:3]


V4_DEFAULT = "Iface\tDestination\tGateway\neth0\t00000000\t0100000A\n"
V6_DEFAULT = f"{'0' * 32} 00 {'0' * 32} 00 fe80{'0' * 27}1 00000400 00000001 00000000 00000003 {{}}\n"


@pytest.mark.parametrize(
    ("v4", "v6", "wanted"),
    [
        (V4_DEFAULT, V6_DEFAULT.format("eth0"), False),
        ("Iface\n", V6_DEFAULT.format("eth0"), True),
        ("Iface\n", V6_DEFAULT.format("lo") + V6_DEFAULT.format("tsd0"), False),
        ("Iface\n", "", False),
    ],
)
def test_d16_networks_without_ipv4_are_seen(tmp_path: Path, v4: str, v6: str, wanted: bool) -> None:
    (tmp_path / "route").write_text(v4)
    (tmp_path / "ipv6_route").write_text(v6)
    assert system.is_ipv6_only("tsd0", tmp_path) is wanted
    assert system.is_ipv6_only("tsd0", tmp_path / "none") is False


def test_d16_without_ipv4_all_names_come_to_us(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """For we know whom to ask there; else the file names the tailnet's servers themselves."""
    monkeypatch.setattr(keeper, "LOOK_S", 0.05)
    bed.names.apply(DnsConfig(resolvers=("192.0.2.1",)))
    assert "nameserver 192.0.2.1\n" in bed.path.read_text()
    monkeypatch.setattr(system, "is_ipv6_only", lambda device: True)
    eventually(lambda: "nameserver 100.100.100.100\n" in bed.path.read_text(), "still theirs")
    monkeypatch.setattr(system, "is_ipv6_only", lambda device: False)
    eventually(lambda: "nameserver 192.0.2.1\n" in bed.path.read_text(), "still ours")


@pytest.mark.parametrize(("enforce", "code", "runs"), [("1", 0, True), ("1", 3, True), ("0", 0, False)])
def test_a_replaced_file_gets_its_selinux_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enforce: str, code: int, runs: bool
) -> None:
    (tmp_path / "enforce").write_text(enforce + "\n")
    program = tmp_path / "restorecon"
    program.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/ran\nexit {code}\n')
    program.chmod(0o755)
    monkeypatch.setattr(programs, "SEARCH_PATH", str(tmp_path))
    if code:
        with pytest.raises(HullError, match="SELinux"):
            file.relabel(tmp_path / "x", tmp_path / "enforce")
    else:
        file.relabel(tmp_path / "x", tmp_path / "enforce")
    assert (tmp_path / "ran").exists() == runs
    file.relabel(tmp_path / "x", tmp_path / "none")

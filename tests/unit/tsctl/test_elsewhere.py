"""Commands of the field that tsctl has not, ssh, and the small debug commands."""

import os
from pathlib import Path

import pytest

from harness.fakebackend import FakeBackend
from tsctl import ssh
from tsctl.elsewhere import COMMANDS, FLAGS, SUBCOMMANDS
from tsctl.root import TABLE
from tsd.base.notify import Mask


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_of_the_field_that_is_not_here_says_what_it_is(name: str, tsctl) -> None:
    asked = tsctl(name, "--bg", "x")
    assert asked.code == 1 and asked.err.startswith(f"tsctl {name}: ") and asked.err.count("\n") == 1
    assert asked.calls == [] and name not in TABLE


@pytest.mark.parametrize("words", [("serve", "3000"), ("serve", "--bg", "3000"), ("serve", "reset"), ("serve", "/srv")])
def test_serving_is_refused_whatever_is_to_be_served(words: tuple[str, ...], tsctl) -> None:
    asked = tsctl(*words)
    assert asked.code == 1 and "serves nothing to the tailnet yet" in asked.err


def test_subcommands_of_the_field_that_are_not_here(tsctl) -> None:
    for command, words in SUBCOMMANDS.items():
        for word in words:
            asked = tsctl(command, word)
            assert asked.code == 1 and asked.err.startswith(f"tsctl {command} {word}: ")
    assert tsctl("serve", "--help").code == 0 and tsctl("serve", "status", "--json").code == 0
    assert tsctl("serve", "nonsense").code == 2 and tsctl("lock", "nonsense").code == 2 and tsctl("nonsense").code == 2


def test_flags_of_the_field_that_are_not_here(tsctl) -> None:
    for command, flags in FLAGS.items():
        for name in flags:
            asked = tsctl(command, f"--{name}=x")
            assert asked.code == 2 and asked.err.startswith(f"tsctl {command} --{name}: ") and asked.calls == []


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda program, words: ran.append(words))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return ran


def test_ssh_goes_through_the_daemon_where_the_kernel_has_no_way(tsctl, executed, tmp_path: Path) -> None:
    assert tsctl("ssh", "root@b", "-v", "uptime").code == 0
    words = executed[0]
    assert words[0] == "ssh" and words[-4:] == ["--", "root@100.64.0.2", "-v", "uptime"]
    proxy = next(word for word in words if word.startswith("ProxyCommand="))
    assert proxy.endswith(f"-m tsctl --socket={tsctl.path} nc %h %p")
    assert "HostKeyAlias=b.tn.example" in words


def test_ssh_believes_only_the_host_keys_that_control_tells(tsctl, backend: FakeBackend, executed) -> None:
    from harness.fakebackend import PEER_KEY, peer_status

    backend.peers = [peer_status(2, "b", PEER_KEY, sshHostKeys=["ssh-ed25519 AAAA\nevil"])]
    tsctl("ssh", "b")
    path = next(word for word in executed[0] if word.startswith("UserKnownHostsFile=")).partition("=")[2].strip('"')
    assert Path(path).read_text() == "b.tn.example ssh-ed25519 AAAA evil\n"
    assert "StrictHostKeyChecking=yes" in executed[0]


def test_ssh_refuses_what_would_be_an_option(tsctl, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tsctl("ssh").code == 2
    assert tsctl("ssh", "x@-oProxyCommand=x").code == 2
    monkeypatch.setattr(ssh, "_options", lambda *_: [])
    monkeypatch.setenv("PATH", "/nowhere")
    asked = tsctl("ssh", "b")
    assert asked.code == 1 and "cannot run ssh" in asked.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("7", "10.1.0.0/16"), "fd7a:115c:a1e0:b1a:0:7:a01:0/112"),
        (("0x7", "192.0.2.1/32"), "fd7a:115c:a1e0:b1a:0:7:c000:201/128"),
        (("fd7a:115c:a1e0:b1a:0:7:a01:0/112",), "site 7 (0x7), 10.1.0.0/16"),
    ],
)
def test_via_routes(words: tuple[str, ...], told: str, tsctl) -> None:
    assert tsctl("debug", "via", *words).out == told + "\n"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("65536", "10.0.0.0/8"),
        ("x", "10.0.0.0/8"),
        ("7", "10.0.0.1/8"),
        ("7", "::/0"),
        ("fd7a::/64",),
        ("10.0.0.0/8",),
    ],
)
def test_wrong_via_routes(words: tuple[str, ...], tsctl) -> None:
    asked = tsctl("debug", "via", *words)
    assert asked.code == 2 and asked.err.count("\n") == 1


def test_small_debug_commands(tsctl) -> None:
    assert tsctl("debug", "local-creds").out.startswith(
        f"curl --unix-socket {tsctl.path} http://local-tailscaled.sock/"
    )
    assert tsctl("debug", "reload-config").err == "the daemon runs without a configuration file (--config)\n"
    assert tsctl("debug", "force-prefer-derp", "x").code == 2


def test_the_bits_of_a_watch_have_names(tsctl) -> None:
    tsctl("debug", "watch-ipn", "--initial", "--count=1", "--peer-patches=false", "--initial-status")
    [asked] = [call for call in tsctl.server.recorded if "watch-ipn-bus" in call]
    mask = Mask(int(asked.partition("mask=")[2]))
    assert Mask.INITIAL_STATUS in mask and Mask.PEER_CHANGES in mask and Mask.PEER_PATCHES not in mask

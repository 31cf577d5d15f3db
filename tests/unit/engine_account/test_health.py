"""Health: what is shown, when, and in which shape."""

from tsd.base.clock import ManualClock
from tsd.engine.report.health import Health


def test_a_warning_shows_after_its_delay_and_hides_what_follows_from_it() -> None:
    clock = ManualClock()
    changes: list[int] = []
    health = Health(clock, lambda: changes.append(1))
    health.set("network-status")
    health.set("no-udp4-bind", error="in use")
    assert [w.warnable.code for w in health.visible()] == []
    deadline = health.next_deadline()
    assert deadline is not None
    assert not changes
    clock.advance(deadline - clock.now())
    health.on_deadline()
    assert [w.warnable.code for w in health.visible()] == ["network-status"]
    assert len(changes) == 1
    health.clear("network-status")
    assert health.texts()[0].startswith("UDP could not be opened (in use)")
    assert len(changes) == 2


def test_setting_the_same_again_changes_nothing() -> None:
    clock = ManualClock()
    changes: list[int] = []
    health = Health(clock, lambda: changes.append(1))
    health.set("login-state", error="no")
    since = health.state()["Warnings"]["login-state"]["BrokenSince"]
    clock.advance(60)
    health.set("login-state", error="no")
    assert len(changes) == 1
    health.set("login-state", error="other")
    assert health.state()["Warnings"]["login-state"]["BrokenSince"] == since
    assert len(changes) == 2


def test_notify_shape_matches_upstream() -> None:
    health = Health(ManualClock())
    assert health.state() == {"Warnings": None}
    health.set("login-state", error="refused")
    state = health.state()["Warnings"]["login-state"]
    assert state["WarnableCode"] == "login-state"
    assert state["Severity"] == "medium"
    assert state["Args"] == {"error": "refused"}
    assert state["DependsOn"] == ["wantrunning-false", "warming-up"]
    assert len(state["ETag"]) == 64
    assert state["BrokenSince"].endswith("Z")
    assert state["Layer"] == "control"


def test_control_messages_become_warnings_and_texts() -> None:
    health = Health(ManualClock())
    message = {"Title": "Billing", "Text": "Overdue.", "PrimaryAction": {"URL": "https://x.example", "Label": "Pay"}}
    health.set_control_messages({"bill": message})
    assert health.texts() == ["Billing: Overdue. Pay: https://x.example"]
    assert health.state()["Warnings"]["control-health.bill"]["Severity"] == "medium"
    health.set_control_messages({})
    assert health.texts() == []


def test_state_store_text_begins_as_tools_expect() -> None:
    health = Health(ManualClock())
    health.set("state-store-health", error="/x: damaged")
    expected = "State store failed to initialize, Tailscale will not work until this is resolved."
    assert health.texts() == [f"{expected} See https://tailscale.com/s/state-store-init-error. Error: /x: damaged"]


def test_arguments_can_be_read() -> None:
    health = Health(ManualClock())
    assert health.argument("state-store-health", "error") == ""
    health.set("state-store-health", error="no room")
    assert health.argument("state-store-health", "error") == "no room"
    assert health.argument("state-store-health", "other") == ""

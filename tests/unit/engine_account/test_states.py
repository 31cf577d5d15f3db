"""The state machine's rules, in order."""

from dataclasses import replace

import pytest

from tsd.engine.account.states import State, StateInputs, next_state

RUNNING = StateInputs(State.RUNNING, want_running=True, has_node_key=True, has_netmap=True)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (replace(RUNNING, is_store_healthy=False), State.NO_STATE),
        (replace(RUNNING, want_running=False), State.STOPPED),
        (replace(RUNNING, want_running=False, is_blocked=True), State.STOPPED),
        (replace(RUNNING, want_running=False, is_blocked=True, has_netmap=False), State.RUNNING),
        (replace(RUNNING, has_netmap=False, logged_out=True), State.NEEDS_LOGIN),
        (replace(RUNNING, has_netmap=False, is_auth_stuck=True), State.NEEDS_LOGIN),
        (replace(RUNNING, has_netmap=False, current=State.STOPPED), State.STARTING),
        (replace(RUNNING, has_netmap=False, current=State.NO_STATE), State.NO_STATE),
        (replace(RUNNING, has_netmap=False, current=State.NEEDS_LOGIN), State.NEEDS_LOGIN),
        (replace(RUNNING, logged_out=True, want_running=False), State.STOPPED),
        (replace(RUNNING, is_key_expired=True), State.NEEDS_LOGIN),
        (replace(RUNNING, is_machine_authorized=False), State.NEEDS_MACHINE_AUTH),
        (replace(RUNNING, current=State.NEEDS_MACHINE_AUTH, derp_connection_count=1), State.STARTING),
        (replace(RUNNING, current=State.STARTING), State.STARTING),
        (replace(RUNNING, current=State.STARTING, derp_connection_count=1), State.RUNNING),
        (replace(RUNNING, current=State.STARTING, live_peer_count=1), State.RUNNING),
        (RUNNING, State.RUNNING),
        (replace(RUNNING, current=State.NEEDS_LOGIN), State.STARTING),
        (StateInputs(), State.NO_STATE),
    ],
)
def test_first_match(inputs: StateInputs, expected: State) -> None:
    assert next_state(inputs) is expected


def test_numbers_and_texts_are_the_fields() -> None:
    assert [state.text for state in sorted(State, key=lambda state: state.value)] == [
        "NoState",
        "InUseOtherUser",
        "NeedsLogin",
        "NeedsMachineAuth",
        "Stopped",
        "Starting",
        "Running",
    ]
    assert State.RUNNING.is_configured and not State.STOPPED.is_configured

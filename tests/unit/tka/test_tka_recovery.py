"""Revoking stolen keys, and links that ask to sign a device."""

from __future__ import annotations

from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from harness.lockkeys import key_id, lock_key, new_authority, signed, trusted, vectors
from tsd.base.errors import TsdError
from tsd.tka.aum import AUM
from tsd.tka.authority import Authority
from tsd.tka.deeplink import check_deeplink
from tsd.tka.recovery import revocation
from tsd.tka.updater import changes


def with_keys(*numbers: int) -> Authority:
    """Key 1 with two votes, then the others one after another, each added by key 1."""
    authority = new_authority(trusted(1, votes=2))
    for number in numbers:
        authority = authority.inform(changes(authority, [trusted(number)], [], key_id(1), lock_key(1).sign))
    return authority


def test_what_a_stolen_key_did_is_undone() -> None:
    before = with_keys(2, 3)
    stolen = changes(before, [trusted(9)], [key_id(1)], key_id(3), lock_key(3).sign)
    robbed = before.inform(stolen)
    assert robbed.is_trusted(key_id(9)) and not robbed.is_trusted(key_id(1))
    recovery = revocation(robbed, {key_id(3), key_id(9)}, key_id(2), None)
    after = robbed.inform([signed(recovery, 2, 1)])
    assert [key.id for key in after.keys] == [key_id(2)]
    assert after.head == signed(recovery, 2, 1).hash()


def test_a_revocation_with_too_few_votes_changes_nothing() -> None:
    before = with_keys(2, 3)
    robbed = before.inform(changes(before, [trusted(9)], [], key_id(3), lock_key(3).sign))
    recovery = revocation(robbed, {key_id(3)}, key_id(2), None)
    assert robbed.inform([signed(recovery, 2)]).head == robbed.head
    assert robbed.inform([signed(recovery, 2, 1)]).head != robbed.head
    forged = signed(recovery, 8)
    with pytest.raises(TsdError, match="not trusted"):
        robbed.inform([forged])


def test_where_to_fork_off_can_be_said() -> None:
    authority = with_keys(2, 3)
    oldest = authority.newest(10)[-1].hash()
    made = revocation(authority, {key_id(3)}, key_id(2), oldest)
    assert made.prev == oldest
    again = AUM.decode(made.encode())
    assert again == made


@pytest.mark.parametrize(("numbers", "why"), [((8,), "none of these keys"), ((1, 2, 3), "not all trusted keys")])
def test_what_cannot_be_revoked(numbers: tuple[int, ...], why: str) -> None:
    with pytest.raises(TsdError, match=why):
        revocation(with_keys(2, 3), {key_id(number) for number in numbers}, key_id(1), None)


def chain() -> Authority:
    return Authority.replay([bytes.fromhex(entry["raw"]) for entry in vectors()["chain"]])


def test_upstreams_link_is_good() -> None:
    found = check_deeplink(chain(), vectors()["deeplink"])
    assert found["IsValid"] is True and found["Error"] == ""
    assert (found["NodeKey"], found["DeviceName"], found["EmailAddress"]) == ("nodekey:1", "a b", "x@y")


def test_links_of_others_are_not() -> None:
    link = vectors()["deeplink"]
    assert check_deeplink(new_authority(), link)["Error"] == "hmac authentication failed"
    query = {name: values[0] for name, values in parse_qs(urlsplit(link).query).items()}
    for name in query:
        changed = urlencode(query | {name: "ab"})
        assert not check_deeplink(chain(), f"tailscale://sign-device/v1/?{changed}")["IsValid"]
        missing = urlencode({other: value for other, value in query.items() if other != name})
        assert not check_deeplink(chain(), f"tailscale://sign-device/v1/?{missing}")["IsValid"]


@pytest.mark.parametrize(
    "url", ["", "https://x/", "tailscale://other/v1/?nk=1", "tailscale://sign-device/v2/", "http://["]
)
def test_what_is_no_link(url: str) -> None:
    found = check_deeplink(chain(), url)
    assert found["IsValid"] is False and found["Error"]

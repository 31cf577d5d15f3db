"""People (tailscale: tailcfg/tailcfg.go, User, Login and UserProfile)."""

from __future__ import annotations

from tsd.tailcfg.wire import Wire, always


class User(Wire, frozen=True, gc=False):
    id: int = always(0)
    display_name: str = always("")
    profile_pic_url: str = ""
    created: str = ""


class Login(Wire, frozen=True, gc=False):
    id: int = always(0)
    provider: str = always("")
    login_name: str = always("")
    display_name: str = always("")
    profile_pic_url: str = ""


class UserProfile(Wire, frozen=True, gc=False):
    """How a user is shown; referred to by `Node.user`."""

    id: int = always(0)
    login_name: str = always("")
    display_name: str = always("")
    profile_pic_url: str = ""
    groups: tuple[str, ...] | None = None

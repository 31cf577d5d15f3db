"""Names and number codes of the LocalAPI that the daemon and tsctl share. Imports nothing at all.

Spec: tailscale: `ipn/backend.go`, `ipn/prefs.go`, `ipn/ipnstate/ipnstate.go`. JSON objects stay plain dicts in Go's
spelling; this file holds what both sides must agree on. It opens nothing and decides nothing.
"""

CAPABILITY_VERSION = 145
LOCALAPI_HOST = "local-tailscaled.sock"
LOCALAPI_PREFIX = "/localapi/v0/"
DEFAULT_CONTROL_URL = "https://controlplane.tailscale.com"
CONTROL_URL_SYNONYMS = ("", DEFAULT_CONTROL_URL, "https://login.tailscale.com")
ZERO_TIME = "0001-01-01T00:00:00Z"
ZERO_NODE_KEY = "nodekey:" + "0" * 64
ZERO_LOCK_KEY = "nlpub:" + "0" * 64
# An extra field of tsd's own status: which packet pump runs. Its presence tells tsd from tailscaled.
STATUS_PUMP = "Pump"

NO_STATE = "NoState"
IN_USE_OTHER_USER = "InUseOtherUser"
NEEDS_LOGIN = "NeedsLogin"
NEEDS_MACHINE_AUTH = "NeedsMachineAuth"
STOPPED = "Stopped"
STARTING = "Starting"
RUNNING = "Running"
STATE_NAMES = (NO_STATE, IN_USE_OTHER_USER, NEEDS_LOGIN, NEEDS_MACHINE_AUTH, STOPPED, STARTING, RUNNING)

MAX_PING_BYTES = 65467
DNS_QUERY_TYPES = {
    "A": 1,
    "NS": 2,
    "CNAME": 5,
    "SOA": 6,
    "WKS": 11,
    "PTR": 12,
    "HINFO": 13,
    "MINFO": 14,
    "MX": 15,
    "TXT": 16,
    "AAAA": 28,
    "SRV": 33,
    "OPT": 41,
    "ALL": 255,
}
DIAL_PROTOCOL = "ts-dial"


def default_prefs() -> dict[str, object]:
    """What a profile that never logged in holds on Linux, in the order Go prints it."""
    return {
        "ControlURL": "",
        "RouteAll": False,
        "ExitNodeID": "",
        "ExitNodeIP": "",
        "InternalExitNodePrior": "",
        "ExitNodeAllowLANAccess": False,
        "CorpDNS": True,
        "RunSSH": False,
        "RunWebClient": False,
        "WantRunning": False,
        "LoggedOut": True,
        "ShieldsUp": False,
        "AdvertiseTags": None,
        "Hostname": "",
        "NotepadURLs": False,
        "AdvertiseRoutes": None,
        "AdvertiseServices": None,
        "Sync": None,
        "NoSNAT": False,
        "NoStatefulFiltering": True,
        "NetfilterMode": 2,
        "AutoUpdate": {"Check": True, "Apply": None},
        "AppConnector": {"Advertise": False},
        "PostureChecking": False,
        "NetfilterKind": "",
        "RemoteConfig": False,
        "DriveShares": None,
        "Config": None,
    }


OPTIONAL_PREFS = (
    "AutoExitNode",
    "OperatorUser",
    "ProfileName",
    "ForceDaemon",
    "Egg",
    "RelayServerPort",
    "RelayServerStaticEndpoints",
)

_TRUE = ("1", "t", "T", "true", "TRUE", "True")
_FALSE = ("0", "f", "F", "false", "FALSE", "False")


def parse_bool(text: str) -> bool | None:
    """The words that Go's flag package and query parser take for a boolean; None for any other."""
    if text in _TRUE:
        return True
    return False if text in _FALSE else None


_UNIT_NS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}


def parse_duration(text: str) -> float | None:
    """Seconds of a Go duration (`1m30s`, `250ms`, `0`); None when it is not one."""
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    if rest == "0":
        return 0.0
    total_ns = 0.0
    while rest:
        end = _span(rest, "0123456789.")
        unit_end = end + next((i for i, c in enumerate(rest[end:]) if c in "0123456789."), len(rest) - end)
        scale = _UNIT_NS.get(rest[end:unit_end])
        try:
            total_ns += float(rest[:end]) * scale if scale else float("nan")
        except ValueError:
            return None
        if scale is None:
            return None
        rest = rest[unit_end:]
    return sign * total_ns / 1e9 if text.strip("+-") else None


def _span(text: str, allowed: str) -> int:
    return next((i for i, c in enumerate(text) if c not in allowed), len(text))


def format_duration(seconds: float) -> str:
    """A duration as Go prints it: `0s`, `12ms`, `1.5s`, `1m0s`."""
    ns = round(seconds * 1e9)
    if ns == 0:
        return "0s"
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    for unit, scale in (("ns", 1), ("µs", 10**3), ("ms", 10**6)):
        if ns < scale * 1000:
            return f"{sign}{_decimal(ns, scale)}{unit}"
    minutes, rest_ns = divmod(ns, 60 * 10**9)
    hours, minutes = divmod(minutes, 60)
    text = _decimal(rest_ns, 10**9) + "s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{sign}{hours}h{text}" if hours else sign + text


def _decimal(ns: int, scale: int) -> str:
    whole, rest = divmod(ns, scale)
    return f"{whole}.{rest:0{len(str(scale)) - 1}d}".rstrip("0") if rest else str(whole)

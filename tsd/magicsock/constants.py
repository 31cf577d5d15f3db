"""Timings of path selection (tailscale: wgengine/magicsock/{endpoint,magicsock}.go), ours marked as such."""

HEARTBEAT_S = 3.0
SESSION_ACTIVE_S = 45.0
TRUST_S = 6.5
PING_TIMEOUT_S = 5.0
PING_GAP_S = 5.0
UPGRADE_S = 60.0
GOOD_ENOUGH_S = 0.005
ENDPOINTS_FRESH_S = 27.0
OBSERVED_KEEP_S = 45.0
CANDIDATES_MAX = 100

CALL_ME_MAYBE_MAX = 64
"""Ours: endpoints taken from one call-me-maybe."""
CALL_WAITS_S = 2.0
"""Ours: a call-me-maybe waits at most this long for fresh endpoints."""
CALL_GAP_S = 5.0
"""Ours: between two calls to a peer without any candidate."""
PING_BACK_GAP_S = 0.02
"""Ours: while there is no trusted path, a ping is answered with one of our own when the last one was lost."""
UNANSWERED_S = 12.0
"""Ours (W09): WireGuard answers within 10 s by a passive keepalive; more silence than this withdraws trust."""
SHUNNED_S = 8.0
"""Ours (W09): the peer sent by relay alone for this long, so it must have lost the direct path that we use."""
SUSPECT_S = 20.0
SUSPECT_MAX_S = 600.0
"""Ours (W09): how long a path that loses data stays out of use; doubles each time."""
DATA_PROBE_GAP_S = 10.0
"""Ours (W09): afterwards data must have passed it; between two trials."""
RESTUN_GAP_S = 5.0

"""Numbers of the WireGuard protocol (whitepaper, section 6; wireguard-go: `device/constants.go`)."""

REKEY_TIMEOUT_S = 5.0
"""Between two initiations to one peer; a response just sent counts as one."""
REKEY_JITTER_S = 0.334
ABSENT_RETRY_S = 1.0
"""Ours: until the one early retry when a relay does not know the peer yet, or lost our initiation."""
MAX_HANDSHAKE_RETRIES = 18
"""Retried while the count is at most this: 20 initiations in about 90 s."""
KEEPALIVE_TIMEOUT_S = 10.0
NEW_HANDSHAKE_S = KEEPALIVE_TIMEOUT_S + REKEY_TIMEOUT_S
REJECT_AFTER_S = 180.0
ZERO_KEYS_S = 3 * REJECT_AFTER_S
COOKIE_REFRESH_S = 120.0
INITIATION_MIN_GAP_S = 0.02
"""From one peer; closer initiations are ignored."""
STAGED_FRAMES = 128

UNDER_LOAD_MESSAGES = 128
"""Handshake messages waiting, beyond which cookies are demanded."""
UNDER_LOAD_STICKY_S = 1.0
HANDSHAKE_DRAIN_PER_S = 500.0
"""How many handshake messages a second we are willing to compute; the rest counts as waiting."""
RATE_PER_S = 20.0
RATE_BURST = 5.0

MESSAGE_INITIATION = 1
MESSAGE_RESPONSE = 2
MESSAGE_COOKIE_REPLY = 3
INITIATION_BYTES = 148
RESPONSE_BYTES = 92
COOKIE_REPLY_BYTES = 64
MAC_BYTES = 16

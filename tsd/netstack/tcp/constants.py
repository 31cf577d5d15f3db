"""Numbers of TCP: header flags, states, timers and limits, each with its source."""

FIN = 0x01
SYN = 0x02
RST = 0x04
PSH = 0x08
ACK = 0x10
URG = 0x20

CLOSED = 0
SYN_SENT = 1
SYN_RECEIVED = 2
ESTABLISHED = 3
FIN_WAIT_1 = 4
FIN_WAIT_2 = 5
CLOSE_WAIT = 6
CLOSING = 7
LAST_ACK = 8
TIME_WAIT = 9

STATE_NAMES = (
    "CLOSED",
    "SYN-SENT",
    "SYN-RECEIVED",
    "ESTABLISHED",
    "FIN-WAIT-1",
    "FIN-WAIT-2",
    "CLOSE-WAIT",
    "CLOSING",
    "LAST-ACK",
    "TIME-WAIT",
)

# What a connection tells its owner (bits).
CONNECTED = 1
READABLE = 2
WRITABLE = 4
DEAD = 8

DEFAULT_MSS = 536  # RFC 9293 3.7.1, IPv4, when the SYN carries no option
DEFAULT_MSS_V6 = 1220
MIN_MSS = 64
WINDOW_SHIFT = 8  # windows up to 16 MiB
MAX_WINDOW_SHIFT = 14  # RFC 7323 2.3
INITIAL_SEGMENTS = 10  # RFC 6928
MAX_PACKET_BYTES = 60240  # of a super-segment: at the usual MTU its 49 pieces fill one UDP_SEGMENT send once sealed

INITIAL_RTO_S = 1.0  # RFC 6298
MIN_RTO_S = 0.2  # as Linux
MAX_RTO_S = 60.0
MAX_RETRIES = 15
SYN_RETRIES = 6
SYN_ACK_RETRIES = 5
DELAYED_ACK_S = 0.04
MAX_ACK_DELAY_S = 0.2  # what a peer may wait, for the tail probe
MIN_PROBE_S = 0.01
TIME_WAIT_S = 60.0
ORPHAN_S = 60.0  # FIN-WAIT-2 without an owner, as Linux
KEEPALIVE_IDLE_S = 7200.0  # RFC 9293 3.8.4
KEEPALIVE_INTERVAL_S = 75.0
KEEPALIVE_PROBES = 9
CHALLENGE_INTERVAL_S = 0.5  # RFC 5961 7: at most one challenge ACK per interval and connection
PAWS_IDLE_S = 24 * 86400.0  # RFC 7323 5.5

RECEIVE_BUFFER_BYTES = 128 << 10
RECEIVE_BUFFER_MAX_BYTES = 8 << 20
SEND_BUFFER_BYTES = 256 << 10
SEND_BUFFER_MAX_BYTES = 4 << 20
MAX_OUT_OF_ORDER_RUNS = 1024

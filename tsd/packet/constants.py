"""Protocol numbers and flags of inner packets (IANA "Protocol Numbers"; RFC 9293, 792, 4443)."""

ICMP = 1
IGMP = 2
TCP = 6
UDP = 17
IPV6_FRAGMENT = 44
ICMPV6 = 58
TSMP = 99
"""Messages between overlay nodes; IANA lists 99 as "any private encryption scheme"."""
SCTP = 132

UNKNOWN = 0
"""What cannot be judged: too short, cut off, an extension header that is not read. Filters drop it."""
FRAGMENT = 255
"""A later fragment, which has no transport header. Never a wire value."""

IPV4_HEADER_BYTES = 20
IPV6_HEADER_BYTES = 40
UDP_HEADER_BYTES = 8
TCP_HEADER_BYTES = 20
IPV6_FRAGMENT_HEADER_BYTES = 8
MIN_FRAGMENT_OFFSET_UNITS = 10
"""Later fragments that start below 80 bytes could overwrite a transport header (RFC 1858)."""

TCP_FIN = 0x01
TCP_SYN = 0x02
TCP_RST = 0x04
TCP_PSH = 0x08
TCP_ACK = 0x10
TCP_URG = 0x20

ICMP_ECHO_REPLY = 0
ICMP_UNREACHABLE = 3
ICMP_ECHO_REQUEST = 8
ICMP_TIME_EXCEEDED = 11
ICMP_PARAMETER_PROBLEM = 12

ICMPV6_UNREACHABLE = 1
ICMPV6_TOO_BIG = 2
ICMPV6_TIME_EXCEEDED = 3
ICMPV6_PARAMETER_PROBLEM = 4
ICMPV6_ECHO_REQUEST = 128
ICMPV6_ECHO_REPLY = 129

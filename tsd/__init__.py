"""tsd: a userspace WireGuard overlay daemon, wire-compatible with Tailscale and headscale.

The map of the rooms is ARCHITECTURE.md. Package `__init__` files import nothing, so that
`tsctl` can read single modules without paying for the rest.
"""

"""Tailnet lock: who may say which node keys belong to a tailnet (tailscale: tka)."""

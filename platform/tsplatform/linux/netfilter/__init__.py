"""The firewall: one description of our rules, rendered by nftables or iptables, whichever the host lives with."""

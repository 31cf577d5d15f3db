"""Pretended `nft` and `iptables`: what was written to them, and what they say when they are asked."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tsd.base.errors import HullError


class FakeNft:
    """Keeps the last text as its table."""

    def __init__(self) -> None:
        self.table = ""
        self.written = 0
        self.trouble = ""
        self.unlisted = ""

    def __call__(self, words: Sequence[str], text: str) -> str:
        if self.trouble:
            raise HullError("firewall: nft", self.trouble)
        if words[-1] == "-":
            commands = json.loads(text)["nftables"]
            self.table = text if len(commands) > 2 else ""
            self.written += bool(self.table)
            return ""
        if self.unlisted:
            raise HullError("firewall: nft", self.unlisted)
        if not self.table:
            raise HullError("firewall: nft", "No such file or directory")
        rule = {"chain": "tsd-input", "handle": self.written, "text": self.table}
        return json.dumps({"nftables": [{"metainfo": {}}, {"rule": rule}]})


BUILTIN = ("INPUT", "FORWARD", "POSTROUTING", "PREROUTING", "OUTPUT")
BAD = "what only nft can read"


class FakeIptables:
    """Tables of both families as `iptables-restore --noflush` would leave them."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, list[str]]] = {}
        self.refuses = "nothing"
        self.unlisted: dict[str, HullError] = {}
        self.mixed = ""
        self.hides: set[str] = set()
        """Chains in which nothing of ours is ever found."""

    def __call__(self, words: Sequence[str], text: str) -> str:
        family = "6" if words[0].startswith("ip6") else "4"
        if words[0].endswith("-save"):
            if family + words[-1] in self.unlisted:
                raise self.unlisted[family + words[-1]]
            if self.mixed.startswith("Parsing"):
                raise HullError("firewall: iptables-nft-save", self.mixed)
            return self.mixed or self._save(family, words[-1])
        if words[1:2] == ["--wait"]:
            return self._one(self.tables.get(family + words[4], {}), words[5:])
        if words[3:4] == ["-S"]:
            return self._list_chain(self.tables.get(family + words[2], {}), words[4])
        if self.refuses in words[0] + text:
            raise HullError(f"firewall: {words[0]}", "refused")
        lines = text.splitlines()
        chains = self.tables.setdefault(family + lines[0][1:], {name: [] for name in BUILTIN})
        for line in lines[1:-1]:
            self._do(chains, line)
        return ""

    def _save(self, family: str, table: str) -> str:
        out = []
        for name, chains in self.tables.items():
            if name == family + table and (self.hides & set(chains) or any(BAD in rules for rules in chains.values())):
                return f"# Table `{table}' is incompatible, use 'nft' tool."
            if name == family + table:
                out += [f"*{name[1:]}", *(f":{chain} - [0:0]" for chain in chains)]
                out += [rule for rules in chains.values() for rule in rules] + ["COMMIT"]
        return "\n".join(out)

    def _list_chain(self, chains: dict[str, list[str]], name: str) -> str:
        if name not in chains or BAD in chains[name] or name in self.hides:
            raise HullError("firewall: iptables-nft", f"chain `{name}' in table `filter' is incompatible")
        return "\n".join([f"-P {name} ACCEPT" if name.isupper() else f"-N {name}", *chains[name]])

    def _one(self, chains: dict[str, list[str]], words: Sequence[str]) -> str:
        """`-C` and `-D` find what stands before a rule that cannot be read."""
        verb, name, *rest = words
        if verb == "-X":
            if name not in chains or any(rule.endswith(f" {name}") for rules in chains.values() for rule in rules):
                raise HullError("firewall: iptables-nft", "CHAIN_DEL failed")
            del chains[name]
            return ""
        for rule in chains.get(name, []) or ([BAD] if name in self.hides else []):
            if rule == BAD or name in self.hides:
                raise HullError("firewall: iptables-nft", "Parsing nftables rule failed")
            if rule == f"-A {name} {' '.join(rest)}":
                if verb == "-D":
                    chains[name].remove(rule)
                return ""
        raise HullError("firewall: iptables-nft", "Bad rule (does a matching rule exist in that chain?).")

    def _do(self, chains: dict[str, list[str]], line: str) -> None:
        if line.startswith(":"):
            chains[line[1:].split()[0]] = []
            return
        verb, name, *rest = line.split()
        if verb == "-I":
            chains.setdefault(name, []).insert(0, f"-A {name} {' '.join(rest[1:])}")
        elif verb == "-A":
            chains[name].append(line)
        elif verb == "-D":
            chains[name].remove(f"-A {name} {' '.join(rest)}")
        elif verb == "-F":
            chains[name] = []
        elif verb == "-X":
            assert not any(rule.endswith(f" {name}") for rules in chains.values() for rule in rules), "in use"
            del chains[name]

"""Tailnet lock's status and log as people and programs read them (tailscale: cmd/tailscale/tslockjsonv1)."""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64

from tsctl import context as ctx
from tsctl.goflags import Failure, UsageError
from tsd.base.errors import DecodeError
from tsd.tka import cbor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KINDS = {0: "invalid", 1: "direct", 2: "rotation", 3: "credential"}
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


def b64(raw: bytes) -> str:
    return b2a_base64(raw, newline=False).decode()


def unb64(text: str | None) -> bytes:
    return a2b_base64(text or "")


def url_b64(raw: bytes) -> str:
    return b64(raw).replace("+", "-").replace("/", "_")


def now_s() -> int:
    import time

    return int(time.time())


def hash_text(raw: bytes) -> str:
    """Base32 without padding."""
    number, count = int.from_bytes(raw, "big"), -(-len(raw) * 8 // 5)
    number <<= count * 5 - len(raw) * 8
    return "".join(_ALPHABET[number >> 5 * at & 31] for at in reversed(range(count)))


def hash_argument(text: str) -> str:
    """A hash as the daemon takes it; hex is accepted, too."""
    if len(text) != 64:
        return text
    try:
        return hash_text(bytes.fromhex(text))
    except ValueError:
        raise UsageError(f"--fork-from={text}: not the hash of an update") from None


def _cli(key: object) -> str:
    return str(key or "").replace("nlpub:", "tlpub:", 1)


def _tlpub(raw: bytes | None) -> str:
    return f"tlpub:{(raw or b'').hex()}"


def key_id_of(status: dict[str, Any]) -> bytes:
    return bytes.fromhex(str(status.get("PublicKey") or ":").partition(":")[2])


# --- status


def status_lines(found: dict[str, Any]) -> list[str]:
    is_on, own = bool(found.get("Enabled")), _cli(found.get("PublicKey"))
    has_key = any(key_id_of(found))
    lines = ["Tailnet Lock is ENABLED." if is_on else "Tailnet Lock is NOT enabled.", ""]
    if is_on and found.get("NodeKey") and has_key:
        lines += [*_own_lines(found, own), ""]
    if has_key:
        lines += [f"This node's tailnet-lock key: {own}", ""]
    keys = found.get("TrustedKeys") or []
    if is_on and keys:
        lines += ["Trusted signing keys:", *(_key_line(key, own) for key in keys)]
    refused = found.get("FilteredPeers") or []
    if refused:
        lines += ["", "The following nodes are locked out by tailnet lock and cannot connect to other nodes:"]
        lines += [_peer_line(peer) for peer in refused]
    return lines


def _own_lines(found: dict[str, Any], own: str) -> list[str]:
    if found.get("NodeKeySigned"):
        head = "This node is accessible under Tailnet Lock. Node signature:"
        return [head, *_signature_lines(found.get("NodeKeySignature") or {}, "")]
    return [
        "This node is LOCKED OUT by Tailnet Lock, and action is required to establish connectivity.",
        f"Run the following command on a node with a trusted key:\n\t{ctx.PROGRAM} lock sign {found['NodeKey']} {own}",
    ]


def _signature_lines(found: dict[str, Any], indent: str) -> list[str]:
    lines = [f"{indent}SigKind: {KINDS.get(found.get('SigKind', 0), 'unknown')}"]
    if found.get("Pubkey"):
        lines.append(f"{indent}Pubkey: {_short(unb64(found['Pubkey']))}")
    for name in ("KeyID", "WrappingPubkey"):
        if found.get(name):
            lines.append(f"{indent}{name}: {_tlpub(unb64(found[name]))}")
    if found.get("Nested"):
        lines += [f"{indent}Nested:", *_signature_lines(found["Nested"], indent + "  ")]
    return lines


def _short(raw: bytes) -> str:
    """A node key in short, without its prefix."""
    return f"[{b64(raw[2:])[:5]}]"


def _key_line(key: dict[str, Any], own: str) -> str:
    meta, public = key.get("Metadata") or {}, _cli(key.get("Key"))
    note = "(self)" if public == own else ""
    if meta.get("purpose") == "pre-auth key":
        note += f"(pre-auth key {meta['authkey_stableid']})" if meta.get("authkey_stableid") else "(pre-auth key)"
    return f"\t{public}\t{key.get('Votes')}\t{note}"


def _peer_line(peer: dict[str, Any]) -> str:
    addresses = ",".join(peer.get("TailscaleIPs") or [])
    return f"\t{peer.get('Name')}\t{addresses}\t{peer.get('StableID')}\t{peer.get('NodeKey')}"


def status_json(found: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"SchemaVersion": "1", "Enabled": bool(found.get("Enabled"))}
    own = _cli(found.get("PublicKey"))
    if any(key_id_of(found)):
        told["PublicKey"] = own
    if found.get("NodeKey"):
        told["NodeKey"] = found["NodeKey"]
    if not found.get("Enabled"):
        return told
    told["Head"] = hash_text(bytes(found.get("Head") or ()))
    told["NodeKeySigned"] = bool(found.get("NodeKeySigned"))
    if found.get("NodeKeySignature"):
        told["NodeKeySignature"] = _signature_json(found["NodeKeySignature"])
    told["TrustedKeys"] = [_trusted_json(key) for key in found.get("TrustedKeys") or ()]
    visible = found.get("VisiblePeers") or ()
    told["VisiblePeers"] = [
        {**_peer_json(peer), "NodeKeySignature": _signature_json(peer.get("NodeKeySignature") or {})}
        for peer in visible
    ]
    told["FilteredPeers"] = [_peer_json(peer) for peer in found.get("FilteredPeers") or ()]
    told |= {"State": found["StateID"]} if found.get("StateID") else {}
    return told


def _trusted_json(key: dict[str, Any]) -> dict[str, Any]:
    meta = {"Meta": key["Metadata"]} if key.get("Metadata") else {}
    return {"Kind": key.get("Kind"), "Votes": key.get("Votes"), "Public": _cli(key.get("Key")), **meta}


def _peer_json(peer: dict[str, Any]) -> dict[str, Any]:
    told = {"ID": peer.get("StableID"), "DNSName": peer.get("Name")}
    return {**told, "TailscaleIPs": peer.get("TailscaleIPs"), "NodeKey": peer.get("NodeKey")}


def _signature_json(found: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"SigKind": KINDS.get(found.get("SigKind", 0), "unknown")}
    told |= {"PublicKey": _tlpub(unb64(found["Pubkey"]))} if found.get("Pubkey") else {}
    told |= {"KeyID": _tlpub(unb64(found["KeyID"]))} if found.get("KeyID") else {}
    told["Signature"] = url_b64(unb64(found.get("Signature")))
    told |= {"Nested": _signature_json(found["Nested"])} if found.get("Nested") else {}
    wrapping = found.get("WrappingPubkey")
    return told | ({"WrappingPublicKey": _tlpub(unb64(wrapping))} if wrapping else {})


# --- log


def _decoded(raw: bytes) -> dict[int, Any]:
    """The fields of an update or signature, by number; they are checked by the daemon."""
    try:
        found = cbor.decode(raw)
    except DecodeError as error:
        raise Failure(f"the daemon told an update that cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}


def subject_of(raw: bytes) -> tuple[bytes, bytes]:
    """(node key, the key that may sign its successors) of a node key signature."""
    layer = _decoded(raw)
    node_key = layer.get(2, b"")[2:]
    while not layer.get(6) and layer.get(1) == 2 and isinstance(layer.get(5), dict):
        layer = layer[5]
    return node_key, layer.get(6, b"")


def update_lines(update: dict[str, Any]) -> list[str]:
    found, change = _decoded(unb64(update.get("Raw"))), update.get("Change")
    lines = [f"update {hash_text(bytes(update.get('Hash') or ()))} ({change})"]
    if change == "add-key":
        lines += _log_key(found.get(3) or {}, "")
    elif change in ("remove-key", "update-key"):
        lines += [f"KeyID: {_tlpub(found.get(4))}"]
        lines += [f"Votes: {found[6]}"] if found.get(6) is not None else []
        lines += [f"Metadata: {_go_map(found[7])}"] if found.get(7) else []
    elif change == "checkpoint":
        state = found.get(5) or {}
        lines += ["Disablement values:", *(f" - {value.hex()}" for value in state.get(2) or ()), "Keys:"]
        lines += [line for key in state.get(3) or () for line in _log_key(key, "  ")]
    return lines


def _log_key(key: dict[int, Any], prefix: str) -> list[str]:
    kind = "25519" if key.get(1) == 1 else f"Key?<{key.get(1)}>"
    lines = [f"{prefix}Type: {kind}", f"{prefix}KeyID: {_tlpub(key.get(3))}"]
    return [*lines, f"{prefix}Metadata: {_go_map(key[12])}"] if key.get(12) else lines


def _go_map(values: dict[str, str]) -> str:
    return "map[" + " ".join(f"{name}:{values[name]}" for name in sorted(values)) + "]"


def update_json(update: dict[str, Any]) -> dict[str, Any]:
    raw = unb64(update.get("Raw"))
    found = _decoded(raw)
    told: dict[str, Any] = {"MessageKind": update.get("Change")}
    told |= {"PrevAUMHash": hash_text(found[2])} if found.get(2) else {}
    told |= {"Key": _key_json(found[3])} if found.get(3) else {}
    told |= {"KeyID": _tlpub(found[4])} if found.get(4) else {}
    told |= {"State": _state_json(found[5])} if found.get(5) else {}
    told |= {"Votes": found[6]} if found.get(6) else {}
    told |= {"Meta": found[7]} if found.get(7) else {}
    signatures = [{"KeyID": _tlpub(one.get(1)), "Signature": url_b64(one.get(2) or b"")} for one in found.get(23) or ()]
    told |= {"Signatures": signatures} if signatures else {}
    return {"Hash": hash_text(bytes(update.get("Hash") or ())), "AUM": told, "Raw": url_b64(raw)}


def _key_json(key: dict[int, Any]) -> dict[str, Any]:
    kind = "25519" if key.get(1) == 1 else f"Key?<{key.get(1)}>"
    meta = {"Meta": key[12]} if key.get(12) else {}
    return {"Kind": kind, "Votes": key.get(2), "Public": _tlpub(key.get(3)), **meta}


def _state_json(state: dict[int, Any]) -> dict[str, Any]:
    values = [value.hex() for value in state.get(2) or ()]
    keys = [_key_json(key) for key in state.get(3) or ()]
    return {"DisablementValues": values, "Keys": keys, "StateID1": state.get(4, 0), "StateID2": state.get(5, 0)}

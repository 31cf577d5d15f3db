"""`tsctl lock`: who may say which nodes belong to the tailnet (tailscale: cmd/tailscale/cli/tailnet-lock.go)."""

from __future__ import annotations

import os
import sys

from tsctl import context as ctx
from tsctl import fastjson, locktext
from tsctl.client import ApiFailure
from tsctl.goflags import Command, Failure, Flag, Parsed, UsageError
from tsctl.locktext import b64, key_id_of, unb64

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_JSON = Flag("json", "print JSON", "", optional_value="1")
_NO_KEYS = "missing argument, expected one or more tailnet lock keys"
NOT_TRUSTED = "this node is not trusted by Tailnet Lock"
SECRET_BYTES = 32
_TIMEOUT_S = 120.0


def lock_command(context: ctx.Context) -> Command:
    made = Lock(context)

    def sub(name: str, summary: str, run: Callable[[Parsed], None], usage: str = "", **more: Any) -> Command:
        return Command(name, summary, run, usage=usage, **more)

    keys, many = "<tlpub:...>...", {"max_args": -1}
    subcommands = (
        sub("init", "Switch tailnet lock on", made.init, f"[flags] {keys}", flags=INIT_FLAGS, **many),
        sub("status", "Whether it is on, whom it keeps out, and this node's key", made.status, flags=(_JSON,)),
        sub("add", "Trust more signing keys", made.add, keys, **many),
        sub("remove", "Trust signing keys no more", made.remove, f"[flags] {keys}", flags=REMOVE_FLAGS, **many),
        sub("sign", "Sign a node, or an auth key", made.sign, SIGN_USAGE, details=SIGN_DETAILS, **many),
        sub("disable", "Switch it off for the tailnet, with a disablement secret", made.disable, SECRET_USAGE, **many),
        sub("disablement-kdf", "Print the public value of a disablement secret", made.kdf, "<hex>", **many),
        sub("log", "Show how it came to be what it is", made.log, flags=(_LIMIT, _JSON)),
        sub("local-disable", "Let everybody in, on this node only", made.local_disable),
        sub("revoke-keys", "Undo what stolen keys did", made.revoke, REVOKE_USAGE, flags=REVOKE_FLAGS, **many),
        Command("tskey-wrap", "Sign an auth key", made.wrap, max_args=-1, is_hidden=True),
    )
    summary = "Manage tailnet lock"
    return Command("lock", summary, made.status, flags=(_JSON,), subcommands=subcommands)


INIT_FLAGS = (
    Flag("gen-disablements", "how many secrets to make that can switch it off again", 1),
    Flag("gen-disablement-for-support", "also make one and give it to the coordination server's support", False),
    Flag("confirm", "do it; without this it is only told what would be done", False),
)
REMOVE_FLAGS = (Flag("re-sign", "sign the nodes again that only these keys vouch for", True),)
_LIMIT = Flag("limit", "how many updates to show", 50)
REVOKE_FLAGS = (
    Flag("cosign", "add this node's signature to a recovery blob", False),
    Flag("finish", "hand the recovery blob in", False),
    Flag("fork-from", "hash of the update to fork off from", ""),
)
SIGN_USAGE = "<node-key> [<rotation-key>] | <auth-key>"
SIGN_DETAILS = (
    "A node key is signed and the signature given to the coordination server; of an auth key, the signed form is\n\
printed, with which nodes join a locked tailnet. file:PATH reads a key from a file."
)
SECRET_USAGE = "disablement-secret:<hex>"
REVOKE_USAGE = "<tlpub:...>... | --cosign <blob> | --finish <blob>"


class Lock:
    def __init__(self, context: ctx.Context) -> None:
        self._client = context.client

    def _post(self, name: str, body: object, expect: tuple[int, ...] = (200,)) -> bytes:
        return self._client.call("POST", f"tka/{name}", body, expect=expect, timeout_s=_TIMEOUT_S).body

    def _status(self) -> dict[str, Any]:
        found = self._client.get("tka/status")
        if not isinstance(found, dict):
            raise Failure("the daemon's answer about tailnet lock is not an object")
        return found

    def _enabled(self) -> dict[str, Any]:
        found = self._status()
        if not found.get("Enabled"):
            raise Failure("Tailnet Lock is not enabled")
        return found

    # --- looking

    def status(self, parsed: Parsed) -> None:
        found = self._status()
        if _wants_json(parsed):
            ctx.out(ctx.to_json(locktext.status_json(found)))
        else:
            ctx.out("\n".join(locktext.status_lines(found)))

    def log(self, parsed: Parsed) -> None:
        self._enabled()
        updates = self._client.get(f"tka/log?limit={parsed.number('limit')}") or []
        if _wants_json(parsed):
            messages = [locktext.update_json(update) for update in updates]
            ctx.out(ctx.to_json({"SchemaVersion": "1", "Messages": messages}))
            return
        for update in updates:
            ctx.out("\n".join(locktext.update_lines(update)) + "\n")

    def kdf(self, parsed: Parsed) -> None:
        [secret] = _exactly(parsed.args, 1, "usage: tsctl lock disablement-kdf <hex-encoded disablement secret>")
        ctx.out(f"disablement:{_computed([f'value {_hex(secret, 1).hex()}'])[0]}")

    # --- changing

    def init(self, parsed: Parsed) -> None:
        found = self._status()
        if found.get("Enabled"):
            raise Failure("tailnet lock is already enabled")
        keys, values = _keys_and_values(parsed.args)
        if key_id_of(found) not in [unb64(key["Public"]) for key in keys]:
            raise UsageError("the tailnet lock key of this node must be among the trusted ones: tsctl lock shows it")
        count, wants_support = parsed.number("gen-disablements"), parsed.flag("gen-disablement-for-support")
        if count < 0 or count + len(values) + wants_support < 1:
            raise UsageError("--gen-disablements: at least one secret is needed to switch tailnet lock off again")
        ctx.out("You are initializing tailnet lock with the following trusted signing keys:")
        for key in keys:
            ctx.out(f" - tlpub:{unb64(key['Public']).hex()} (25519 key)")
        ctx.out()
        if not parsed.flag("confirm"):
            _tell_to_confirm(count, wants_support, parsed.args)
            return
        secrets = [os.urandom(SECRET_BYTES) for _ in range(count + wants_support)]
        values += [bytes.fromhex(line) for line in _computed([f"value {secret.hex()}" for secret in secrets])]
        support = b64(secrets.pop()) if wants_support else None
        request = {"Keys": keys, "DisablementValues": [b64(value) for value in values], "SupportDisablement": support}
        try:
            self._post("init", request)
        except BaseException:
            ctx.out("Tailnet lock may be in force all the same: `tsctl lock` tells, with the next netmap.")
            _tell_secrets(secrets)
            raise
        _tell_secrets(secrets)
        if wants_support:
            ctx.out("One more was made and given to the coordination server's support.")
        ctx.out("Initialization complete.")

    def add(self, parsed: Parsed) -> None:
        keys = _some_keys(parsed.args)
        self._enabled()
        self._modify(keys, [])

    def remove(self, parsed: Parsed) -> None:
        keys = _some_keys(parsed.args)
        found = self._enabled()
        if len(found.get("TrustedKeys") or ()) == 1:
            raise Failure("the last trusted key cannot be removed; `tsctl lock disable` switches tailnet lock off")
        if parsed.flag("re-sign"):
            self._sign_again(keys, key_id_of(found))
        self._modify([], keys)

    def _sign_again(self, keys: list[dict[str, Any]], own: bytes) -> None:
        ids = [unb64(key["Public"]) for key in keys]
        if own in ids:
            raise UsageError(
                "this node cannot sign again with the key that is removed: do it on another, or --re-sign=false"
            )
        for key_id in ids:
            for text in fastjson.loads(self._post("affected-sigs", key_id)) or []:
                node_key, rotation = locktext.subject_of(unb64(text))
                self._post("sign", {"NodeKey": f"nodekey:{node_key.hex()}", "RotationPublic": b64(rotation)})

    def _modify(self, add: list[dict[str, Any]], remove: list[dict[str, Any]]) -> None:
        self._post("modify", {"AddKeys": add, "RemoveKeys": remove}, (204,))

    def sign(self, parsed: Parsed) -> None:
        words = [_from_file(word) for word in parsed.args]
        if words and words[0].startswith("tskey-auth-"):
            self._wrap(words)
            return
        if not 1 <= len(words) <= 2:
            raise UsageError(f"usage: tsctl lock sign {SIGN_USAGE}")
        if not words[0].startswith("nodekey:"):
            raise UsageError(
                f"{words[0]!r} is not a node key: those begin with nodekey: and `tsctl status --json` has them"
            )
        _hex(words[0].removeprefix("nodekey:"), 32)
        rotation = _key_bytes(words[1]) if len(words) > 1 else b""
        try:
            self._post("sign", {"NodeKey": words[0], "RotationPublic": b64(rotation)})
        except ApiFailure as failure:
            if NOT_TRUSTED not in failure.message:
                raise
            raise Failure(
                f"{failure.message}: signing is not available on this device. Try again on a signing device;"
                " `tsctl lock` lists their keys, and marks a node's own with (self)"
            ) from None

    def wrap(self, parsed: Parsed) -> None:
        self._wrap([_from_file(word) for word in parsed.args])

    def _wrap(self, words: Sequence[str]) -> None:
        [auth_key] = _exactly(words, 1, "usage: tsctl lock sign <auth-key>")
        if "--TL" in auth_key:
            raise UsageError("this auth key is signed already")
        own = (self._client.status(with_peers=False).get("Self") or {}).get("ID", "")
        seed = os.urandom(32)
        [public] = _computed([f"public {seed.hex()}"])
        meta = {"purpose": "pre-auth key", "wrapper_stableid": str(own), "wrapper_createtime": str(locktext.now_s())}
        stable_id, dash, _ = auth_key.removeprefix("tskey-auth-").partition("-")
        if dash and stable_id:
            meta["authkey_stableid"] = stable_id
        wrapped = self._post("wrap-preauth-key", {"TSKey": auth_key, "TKAKey": f"nlpriv:{seed.hex()}{public}"})
        self._modify([{"Kind": 1, "Votes": 1, "Public": b64(bytes.fromhex(public)), "Meta": meta}], [])
        ctx.out(wrapped.decode())

    def disable(self, parsed: Parsed) -> None:
        usage = f"usage: tsctl lock disable {SECRET_USAGE}"
        [word] = _exactly(parsed.args, 1, usage)
        kind, _, text = word.partition(":")
        if kind not in ("disablement-secret", "disablement"):
            raise UsageError(usage)
        self._post("disable", _hex(text, 1))

    def local_disable(self, parsed: Parsed) -> None:
        self._post("force-local-disable", {})

    def revoke(self, parsed: Parsed) -> None:
        if not (parsed.flag("cosign") or parsed.flag("finish")):
            keys = [key["Public"] for key in _some_keys(parsed.args)]
            fork = locktext.hash_argument(parsed.text("fork-from"))
            blob = self._post("generate-recovery-aum", {"Keys": keys, "ForkFrom": fork}).hex().upper()
            ctx.out("Run the following command on another machine with a trusted tailnet lock key:")
            ctx.out(f"\t{ctx.PROGRAM} lock revoke-keys --cosign {blob}")
            return
        [text] = _exactly(parsed.args, 1, f"usage: tsctl lock revoke-keys {REVOKE_USAGE}")
        raw = _hex(text, 1)
        if parsed.flag("cosign"):
            raw = self._post("cosign-recovery-aum", raw)
            blob = raw.hex().upper()
            ctx.out("Signed. For one more signature, run on another machine with a trusted tailnet lock key:")
            ctx.out(f"\t{ctx.PROGRAM} lock revoke-keys --cosign {blob}\n")
            ctx.out(f"With enough of them, finish with:\n\t{ctx.PROGRAM} lock revoke-keys --finish {blob}")
        if parsed.flag("finish"):
            self._post("submit-recovery-aum", raw)
            ctx.out("Recovery completed.")


# --- words


def _wants_json(parsed: Parsed) -> bool:
    version = parsed.text("json")
    if version not in ("", "false", "1", "true"):
        raise UsageError(f"--json={version}: only version 1 is known")
    return version not in ("", "false")


def _exactly(words: Sequence[str], count: int, usage: str) -> Sequence[str]:
    if len(words) != count:
        raise UsageError(usage)
    return words


def _hex(text: str, least: int) -> bytes:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) < least:
        raise UsageError(f"{text[:80]!r} is not hex, or too short")
    return raw


def _key_bytes(word: str) -> bytes:
    kind, _, text = word.partition(":")
    if kind not in ("tlpub", "nlpub") or len(text) != 64:
        raise UsageError(
            f"{word[:80]!r} is not a tailnet lock key: tlpub: and 64 hex digits, as `tsctl lock` shows them"
        )
    return _hex(text, 32)


def _some_keys(words: Sequence[str]) -> list[dict[str, Any]]:
    if not words:
        raise UsageError(_NO_KEYS)
    return [_key(word) for word in words]


def _key(word: str) -> dict[str, Any]:
    """`tlpub:HEX?VOTES`."""
    name, mark, votes = word.partition("?")
    if mark and not (votes.isascii() and votes.isdigit()):
        raise UsageError(f"{word[:80]!r}: what follows ? is the number of votes")
    return {"Kind": 1, "Votes": int(votes or "1"), "Public": b64(_key_bytes(name)), "Meta": None}


def _keys_and_values(words: Sequence[str]) -> tuple[list[dict[str, Any]], list[bytes]]:
    keys, values = [], []
    for word in words:
        kind, _, text = word.partition(":")
        if kind in ("disablement", "disablement-secret"):
            values.append(_hex(text, 1))
        else:
            keys.append(_key(word))
    return keys, values


def _from_file(word: str) -> str:
    if not word.startswith("file:"):
        return word
    path = word.removeprefix("file:")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(65536).strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"cannot read the key from {path}: {reason}") from None


def _tell_secrets(secrets: Sequence[bytes]) -> None:
    ctx.out(f"{len(secrets)} disablement secrets were made. Keep them safe now: they will not be shown again.")
    for secret in secrets:
        ctx.out(f"\tdisablement-secret:{secret.hex().upper()}")


def _tell_to_confirm(count: int, wants_support: bool, words: Sequence[str]) -> None:
    ctx.out(f"{count} disablement secrets will be generated.")
    if wants_support:
        ctx.out("One more will be generated and given to the coordination server's support.")
    flag = "--gen-disablement-for-support " if wants_support else ""
    ctx.out("\nIf this is correct, run the command again with --confirm:")
    ctx.out(f"\t{ctx.PROGRAM} lock init --confirm --gen-disablements {count} {flag}{' '.join(words)}")


def _computed(lines: Sequence[str]) -> list[str]:
    """See `tsd.tka.__main__`."""
    import subprocess

    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-m", "tsd.tka"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    answers = done.stdout.split()
    if done.returncode or len(answers) != len(lines):
        raise Failure(f"cannot compute what tailnet lock needs: {done.stderr.strip()[-300:] or 'no answer'}")
    return answers


COMMANDS = {"lock": lock_command}

"""A second look at JSON that the strict decoder refused, with two habits of Go's encoding/json.

Text that is not Unicode (broken UTF-8, half a surrogate pair) reads as U+FFFD, and `null` where a value is wanted
means "as if left out". Only tried after a failure, so it costs nothing in the usual case.
"""

from __future__ import annotations

import re
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec

T = TypeVar("T")

_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\.", re.DOTALL
)
_LONE_BYTES = 6


def decode(raw: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Raises what msgspec raises when this does not help either."""
    text = mended_text(bytes(raw))
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        value = without_nulls(msgspec.json.decode(text), kind)
        return msgspec.json.decode(msgspec.json.encode(value), type=kind)


def mended_text(raw: bytes) -> bytes:
    """JSON that is valid Unicode, inside its escapes too."""
    return _ESCAPE.sub(_mended_escape, raw.decode("utf-8", "replace")).encode()


def _mended_escape(found: re.Match[str]) -> str:
    text = found[0]
    is_lone = len(text) == _LONE_BYTES and text[1] == "u"
    return "\\ufffd" if is_lone else text


def without_nulls(value: Any, kind: Any) -> Any:
    """`value` (plain JSON) without the nulls that `kind` does not take."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kinds = [one for one in arguments if one is not NoneType]
        return without_nulls(value, kinds[0]) if value is not None and len(kinds) == 1 else value
    if origin in (tuple, list) and isinstance(value, list):
        item = arguments[0]
        return [without_nulls(one, item) for one in value if one is not None or _takes_none(item)]
    if not isinstance(value, dict):
        return value
    if origin is dict:
        item = arguments[1]
        return {name: without_nulls(one, item) for name, one in value.items() if one is not None or _takes_none(item)}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct_without_nulls(value, kind)
    return value


def _struct_without_nulls(value: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    kinds = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    kept = {name: one for name, one in value.items() if one is not None or _takes_none(kinds.get(name, Any))}
    return {name: without_nulls(one, kinds.get(name, Any)) for name, one in kept.items()}


def _takes_none(kind: Any) -> bool:
    return kind in (Any, msgspec.Raw, NoneType) or NoneType in get_args(kind)

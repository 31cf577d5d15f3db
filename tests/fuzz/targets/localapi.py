"""Foreign bytes of the LocalAPI side: request heads, chunked bodies; and, in tsctl, STUN and DNS answers."""

from tsctl.dns import read_reply
from tsctl.stunprobe import stun_answer
from tsd.localapi.http1 import BadRequest, ChunkedDecoder, body_length, find_head_end, parse_head


def fuzz_localapi_http1(data: bytes) -> None:
    end = find_head_end(data)
    if end < 0:
        return
    try:
        head = parse_head(data[:end])
        length = body_length(head)
    except BadRequest as error:
        assert 400 <= error.status < 600
        return
    assert head.method and head.target
    if length < 0:
        _decode_chunks(bytearray(data[end:]))


def _decode_chunks(buffer: bytearray) -> None:
    decoder, before = ChunkedDecoder(), len(buffer)
    total = 0
    try:
        while piece := decoder.take(buffer):
            total += len(piece)
    except BadRequest:
        return
    assert total <= before and len(buffer) <= before


def fuzz_localapi_chunked(data: bytes) -> None:
    _decode_chunks(bytearray(data))


def fuzz_tsctl_stun(data: bytes) -> None:
    found = stun_answer(data)
    assert found is None or (len(found[0]) == 12 and 0 <= found[2] <= 65535)


def fuzz_tsctl_dns(data: bytes) -> None:
    try:
        read_reply(data)
    except (ValueError, IndexError):
        return

"""HTTP messages: what parses, what is refused and with which status."""

import pytest

from tsd.localapi.http1 import (
    BadRequest,
    ChunkedDecoder,
    body_length,
    chunk,
    find_head_end,
    parse_head,
    response_head,
)


def head(*lines: str) -> bytes:
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def test_head_keeps_spelling_and_finds_names_in_any_case() -> None:
    parsed = parse_head(head("GET /localapi/v0/status?peers=false HTTP/1.1", "host: x", "If-Match:  abc ", "Host2: y"))
    assert (parsed.method, parsed.target, parsed.minor_version) == ("GET", "/localapi/v0/status?peers=false", 1)
    assert parsed.get("HOST") == "x" and parsed.get("if-match") == "abc" and parsed.get("nope", "z") == "z"
    assert parsed.headers[1][0] == "If-Match"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (("GET / HTTP/2.0",), 505),
        (("GET / http/1.1",), 400),
        (("GET  / HTTP/1.1",), 400),
        (("GET /a b HTTP/1.1",), 400),
        (("G\x00T / HTTP/1.1",), 400),
        (("GET /\x7f HTTP/1.1",), 400),
        (("GET / HTTP/1.1", "no colon"), 400),
        (("GET / HTTP/1.1", "name : v"), 400),
        (("GET / HTTP/1.1", " folded: v"), 400),
        (("GET / HTTP/1.1", "a: b\x01c"), 400),
        (("GET / HTTP/1.1", "Content-Length: 1", "Content-Length: 2"), 400),
        (("GET / HTTP/1.1", "Content-Length: -1"), 400),
        (("GET / HTTP/1.1", "Content-Length: 1", "Transfer-Encoding: chunked"), 400),
        (("GET / HTTP/1.1", "Transfer-Encoding: gzip"), 501),
        (("GET / HTTP/1.0", "Transfer-Encoding: chunked"), 501),
        (("GET / HTTP/1.1", "Host: a", "Host: b"), 400),
    ],
)
def test_malformed_heads_are_refused(lines: tuple[str, ...], status: int) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_head(head(*lines))
    assert caught.value.status == status


def test_body_length() -> None:
    assert body_length(parse_head(head("POST / HTTP/1.1"))) == 0
    assert body_length(parse_head(head("POST / HTTP/1.1", "Content-Length: 12"))) == 12
    assert body_length(parse_head(head("POST / HTTP/1.1", "Transfer-Encoding: Chunked"))) == -1


def test_keep_alive_rules() -> None:
    assert parse_head(head("GET / HTTP/1.1")).keeps_alive
    assert not parse_head(head("GET / HTTP/1.1", "Connection: Close")).keeps_alive
    assert not parse_head(head("GET / HTTP/1.0")).keeps_alive
    assert parse_head(head("GET / HTTP/1.0", "Connection: keep-alive")).keeps_alive


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_chunked_body_in_pieces_of_any_size(step: int) -> None:
    wire = chunk(b"hello ") + b"5;ext=1\r\nworld\r\n" + b"0\r\nTrailer: x\r\n\r\n" + b"REST"
    decoder, buffer, found = ChunkedDecoder(), bytearray(), b""
    for start in range(0, len(wire), step):
        buffer += wire[start : start + step]
        while piece := decoder.take(buffer):
            found += piece
    assert found == b"hello world" and decoder.is_done and bytes(buffer) == b"REST"


@pytest.mark.parametrize(
    "wire", [b"xyz\r\n", b"\r\n", b"-1\r\n", b"1\r\nabc", b"ffffffffffffffffffff\r\n", b"a" * 2000, b"0x1\r\na\r\n"]
)
def test_chunk_abuse_is_refused(wire: bytes) -> None:
    decoder, buffer = ChunkedDecoder(), bytearray(wire)
    with pytest.raises(BadRequest):
        for _ in range(5):
            decoder.take(buffer)
        raise AssertionError("accepted")


def test_endless_trailers_are_refused() -> None:
    decoder, buffer = ChunkedDecoder(), bytearray(b"0\r\n" + b"a: b\r\n" * 5000)
    with pytest.raises(BadRequest):
        decoder.take(buffer)


def test_response_head_is_exact() -> None:
    assert response_head(204, [("Etag", "x")]) == b"HTTP/1.1 204 No Content\r\nEtag: x\r\n\r\n"
    assert response_head(299, []).startswith(b"HTTP/1.1 299 ")


def test_head_end() -> None:
    assert find_head_end(b"GET / HTTP/1.1\r\n") == -1
    assert find_head_end(b"GET / HTTP/1.1\r\n\r\nbody") == 18

"""The batch AEAD kernels against `cryptography`: random batches, edge vectors, damage.

`TSD_AEAD_PACKETS` raises the number of random packets (`make test-native`: a million).
"""

from __future__ import annotations

import os
import random

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

import tsnative
from tsnative import aead

pytestmark = pytest.mark.skipif(tsnative.native is None, reason="the native core is not built")
KERNELS = [name for name in aead.kernels() if name != "library"]
PACKETS = int(os.environ.get("TSD_AEAD_PACKETS", "10000"))

CLAMPED = 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
P = (1 << 130) - 5


def nonce(counter: int) -> bytes:
    return bytes(4) + counter.to_bytes(8, "little")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kernel", KERNELS)
def test_random_batches_equal_the_library(kernel: str) -> None:
    rng = random.Random(PACKETS)
    noise = rng.randbytes(1 << 16)
    done = 0
    while done < PACKETS:
        key = rng.randbytes(32)
        cipher = ChaCha20Poly1305(key)
        batch = []
        for _ in range(rng.choice([1, 2, 3, 7, 8, 9, 44, 64, 100])):
            size = rng.choice([0, 1, 16, 64, 96, 1280, 1296, rng.randrange(2049)])
            at = rng.randrange(len(noise) - size)
            batch.append((rng.getrandbits(rng.choice([3, 32, 64])), noise[at : at + size]))
        sealed = aead.seal(key, batch, kernel)
        assert sealed == [cipher.encrypt(nonce(counter), text, None) for counter, text in batch]
        damaged = [(counter, text) for (counter, _), text in zip(batch, sealed, strict=True)]
        expected: list[bytes | None] = [text for _, text in batch]
        for at in range(0, len(batch), rng.choice([1, 3, 10])):
            text = bytearray(damaged[at][1])
            text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
            damaged[at] = (batch[at][0], bytes(text))
            expected[at] = None
        assert aead.open_(key, damaged, kernel) == expected
        done += len(batch)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_length_and_neighbour(kernel: str) -> None:
    key = bytes(range(32))
    cipher = ChaCha20Poly1305(key)
    text = bytes(range(256)) * 9
    for width in (1, 2, 5, 16):
        for start in range(0, 2200, width):
            batch = [(start + i, text[: start + i]) for i in range(width)]
            expected = [cipher.encrypt(nonce(counter), plaintext, None) for counter, plaintext in batch]
            assert aead.seal(key, batch, kernel) == expected
            sealed = [(counter, raw) for (counter, _), raw in zip(batch, expected, strict=True)]
            assert aead.open_(key, sealed, kernel) == [plaintext for _, plaintext in batch]


def edge_plaintexts(key: bytes, counter: int) -> list[bytes]:
    """Plaintexts whose ciphertexts drive Poly1305 to its borders: limbs all ones, accumulators next to p and 2^128."""
    stream = ChaCha20Poly1305(key).encrypt(nonce(counter), bytes(512), None)[:512]
    shapes = [b"\xff" * 256, bytes(256), b"\xff" * 15 + b"\0" + bytes(240), (b"\xff" * 16 + bytes(16)) * 8]
    shapes += [(b"\xfb" + b"\xff" * 15) * 4, (b"\xfa" + b"\xff" * 15) * 4, (bytes(15) + b"\x80") * 4, b"\xff" * 511]
    shapes += [value.to_bytes(17, "little")[:16] for value in (P & (1 << 128) - 1, P - (1 << 128) & (1 << 128) - 1)]
    return [bytes(a ^ b for a, b in zip(shape, stream, strict=False)) for shape in shapes]


@pytest.mark.parametrize("kernel", KERNELS)
def test_edge_vectors(kernel: str) -> None:
    keys = [bytes(32), b"\xff" * 32, bytes(31) + b"\x80", bytes(range(32))]
    counters = [0, 1, (1 << 32) - 1, 1 << 32, (1 << 63), (1 << 64) - 1]
    for key in keys:
        batch = [(counter, text) for counter in counters for text in edge_plaintexts(key, counter)]
        cipher = ChaCha20Poly1305(key)
        expected = [cipher.encrypt(nonce(counter), text, None) for counter, text in batch]
        assert aead.seal(key, batch, kernel) == expected
        opened = aead.open_(key, [(c, raw) for (c, _), raw in zip(batch, expected, strict=True)], kernel)
        assert opened == [text for _, text in batch]


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_tag_bit_counts(kernel: str) -> None:
    key = bytes(range(32))
    (sealed,) = aead.seal(key, [(7, b"payload")], kernel)
    flips = [
        (7, (int.from_bytes(sealed, "big") ^ 1 << bit).to_bytes(len(sealed), "big")) for bit in range(8 * len(sealed))
    ]
    opened = aead.open_(key, [*flips, (7, sealed), (8, sealed), (7, bytes(16)), (7, sealed[:-1])], kernel)
    assert opened == [None] * len(flips) + [b"payload", None, None, None]


def test_library_kernel_and_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(32)
    monkeypatch.setenv("TSD_AEAD", "library")
    sealed = aead.seal(key, [(1, b"x")])
    assert aead.open_(key, [(1, sealed[0]), (2, sealed[0])]) == [b"x", None]
    with pytest.raises(ValueError, match="no AEAD kernel"):
        aead.seal(key, [(1, b"x")], "avx9")

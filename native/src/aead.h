/* ChaCha20-Poly1305 for batches of WireGuard transport packets (RFC 8439, no AAD, nonce = 0^4 || LE64 counter).
 *
 * Lanes run across packets, so small packets cost little; Poly1305 of one pair of packets is woven into the ChaCha20
 * of the next. Constant time in keys, data and tags. Not a general AEAD: no AAD, and one key per batch. */
#ifndef TSN_AEAD_H
#define TSN_AEAD_H

#include <stddef.h>
#include <stdint.h>

#define AEAD_TAG_BYTES 16
#define AEAD_KEY_BYTES 32

typedef struct {
  uint32_t words[8];
} aead_key;

typedef struct {
  const uint8_t *head; /* seal: the first head_bytes of plaintext come from here */
  const uint8_t *src;  /* seal: the plaintext after head; zeros fill up to `bytes`. open: ciphertext and tag */
  uint8_t *dst;        /* seal: bytes + 16 are written. open: bytes are written, zeros unless ok. dst == src is allowed */
  uint32_t head_bytes; /* seal only; head_bytes + src_bytes <= bytes */
  uint32_t src_bytes;  /* seal only */
  uint32_t bytes;      /* without the tag */
  uint32_t ok;         /* open: 1 when authentic */
  uint64_t counter;
} aead_packet;

typedef struct {
  const char *name;
  void (*run)(const aead_key *key, aead_packet *packets, size_t count, int open);
} aead_kernel;

void aead_set_key(aead_key *key, const uint8_t raw[AEAD_KEY_BYTES]);

/* By name ("avx2", "portable"), or the fastest when name is NULL or empty. NULL: unknown, or not for this CPU. */
const aead_kernel *aead_find(const char *name);

/* Known answers, a tampered tag and in-place use. 0 when all is well, otherwise the number of the failed check. */
int aead_self_test(const aead_kernel *kernel);

void aead_seal(const aead_kernel *kernel, const aead_key *key, aead_packet *packets, size_t count);
void aead_open(const aead_kernel *kernel, const aead_key *key, aead_packet *packets, size_t count);

#endif

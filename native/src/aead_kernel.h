/* The batch kernel, included once per instruction set (aead_portable.c, aead_avx2.c), which define beforehand:
 * KERNEL_RUN (name of the entry), TARGET (function attribute), LANES, LANE_T (vector of LANES u32), ROT16/12/8/7,
 * POLY (block macro of poly1305.h). See aead.h for the contract. */
#include "aead.h"
#include "poly1305.h"

#define GROUP 8  /* packets whose one-time keys are made together */
#define SLOTS 16 /* one-time keys alive at once */
#define SIGMA0 0x61707865u
#define SIGMA1 0x3320646eu
#define SIGMA2 0x79622d32u
#define SIGMA3 0x6b206574u

/* clang-format off */
#define QUARTERS(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
  a += b; e += f; i += j; m += n; d ^= a; h ^= e; l ^= i; p ^= m; d = ROT16(d); h = ROT16(h); l = ROT16(l); p = ROT16(p); \
  c += d; g += h; k += l; o += p; b ^= c; f ^= g; j ^= k; n ^= o; b = ROT12(b); f = ROT12(f); j = ROT12(j); n = ROT12(n); \
  a += b; e += f; i += j; m += n; d ^= a; h ^= e; l ^= i; p ^= m; d = ROT8(d); h = ROT8(h); l = ROT8(l); p = ROT8(p); \
  c += d; g += h; k += l; o += p; b ^= c; f ^= g; j ^= k; n ^= o; b = ROT7(b); f = ROT7(f); j = ROT7(j); n = ROT7(n);
#define COLUMNS QUARTERS(x0, x4, x8, x12, x1, x5, x9, x13, x2, x6, x10, x14, x3, x7, x11, x15)
#define DIAGONALS QUARTERS(x0, x5, x10, x15, x1, x6, x11, x12, x2, x7, x8, x13, x3, x4, x9, x14)
/* clang-format on */

/* One lane of a ChaCha20 batch: a block of a packet's data. */
typedef struct {
  const uint8_t *src;
  uint8_t *dst;
  uint32_t bytes, packet;
} lane;

/* The state of one call: the lanes of the current batch, the generator that fills them, the two Poly1305 streams. */
typedef struct {
  uint8_t stream[LANES * 64] __attribute__((aligned(64)));
  uint32_t counters[3 * LANES] __attribute__((aligned(64))); /* block counter, nonce low, nonce high; per lane */
  uint8_t keys[SLOTS][32];
  uint8_t gather[LANES][64];
  lane lanes[LANES];
  poly_stream a, b;
  uint32_t in_flight; /* Poly1305 streams: 0, 1 (a) or 2 (a and b) */
  uint32_t lane_count, key_lanes;
  aead_packet *packets;
  uint32_t count;
  uint32_t authenticated; /* next packet for Poly1305 */
  uint32_t keyed;         /* packets whose one-time key is there */
  uint32_t asked;         /* packets whose key is there or in the lanes */
  uint32_t group_end;
  uint32_t current, offset;   /* generator */
  uint32_t done, done_offset; /* packets that ChaCha20 has finished; bytes of the next that it has */
  const uint8_t *whole_src;   /* LANES full blocks of one packet, or NULL */
  uint8_t *whole_dst;
} batch;

static const uint32_t iota[8] __attribute__((aligned(32))) = {0, 1, 2, 3, 4, 5, 6, 7};

TARGET TSN_INLINE void absorb(poly_stream *s, uint32_t blocks) {
  uint64_t a0 = s->h0, a1 = s->h1, a2 = s->h2;
  const uint64_t ar[3] = {s->r[0], s->r[1], s->r[2]};
  const uint8_t *p = s->at;
  s->blocks -= blocks;
  for (; blocks; blocks--, p += 16) POLY(a, p);
  s->h0 = a0, s->h1 = a1, s->h2 = a2, s->at = p;
}

TARGET TSN_INLINE void absorb_both(poly_stream *s, poly_stream *t, uint32_t blocks) {
  uint64_t a0 = s->h0, a1 = s->h1, a2 = s->h2, b0 = t->h0, b1 = t->h1, b2 = t->h2;
  const uint64_t ar[3] = {s->r[0], s->r[1], s->r[2]}, br[3] = {t->r[0], t->r[1], t->r[2]};
  const uint8_t *p = s->at, *q = t->at;
  s->blocks -= blocks, t->blocks -= blocks;
  for (; blocks; blocks--, p += 16, q += 16) {
    POLY(a, p);
    POLY(b, q);
  }
  s->h0 = a0, s->h1 = a1, s->h2 = a2, s->at = p;
  t->h0 = b0, t->h1 = b1, t->h2 = b2, t->at = q;
}

/* The rest of the blocks, the tail, the length block, the final reduction. */
TARGET TSN_INLINE void poly_tag(poly_stream *s, uint32_t bytes, const uint8_t *one_time_key, uint8_t tag[16], int open) {
  if (s->blocks) absorb(s, s->blocks);
  uint64_t a0 = s->h0, a1 = s->h1, a2 = s->h2;
  const uint64_t ar[3] = {s->r[0], s->r[1], s->r[2]};
  if (bytes & 15) {
    uint8_t last[16] = {0};
    memcpy(last, open ? s->tail : s->at, bytes & 15);
    POLY(a, last);
  }
  uint64_t no_aad = 0, length = bytes;
  POLY_ADD(a0, a1, a2, no_aad, length, 1);
  POLY_MULTIPLY(a0, a1, a2, ar);
  poly_wide sum = (poly_wide)a0 + 5;
  uint64_t g0 = (uint64_t)sum;
  sum = (poly_wide)a1 + (uint64_t)(sum >> 64);
  uint64_t g1 = (uint64_t)sum, g2 = a2 + (uint64_t)(sum >> 64), mask = 0 - (g2 >> 2);
  a0 = (a0 & ~mask) | (g0 & mask);
  a1 = (a1 & ~mask) | (g1 & mask);
  sum = (poly_wide)a0 + load_le64(one_time_key + 16);
  store_le64(tag, (uint64_t)sum);
  store_le64(tag + 8, (uint64_t)((poly_wide)a1 + load_le64(one_time_key + 24) + (uint64_t)(sum >> 64)));
}

TARGET TSN_INLINE void finish(batch *B, poly_stream *s, const int open) {
  uint8_t tag[16];
  aead_packet *p = &B->packets[s->packet];
  poly_tag(s, p->bytes, B->keys[s->packet % SLOTS], tag, open);
  if (!open) {
    memcpy(p->dst + p->bytes, tag, 16);
    return;
  }
  const uint8_t *given = p->src + p->bytes;
  uint64_t differ = (load_le64(tag) ^ load_le64(given)) | (load_le64(tag + 8) ^ load_le64(given + 8));
  p->ok = (uint32_t)(1 ^ (1 & ((differ | (0 - differ)) >> 63)));
}

TARGET TSN_INLINE void close_streams(batch *B, const int open) {
  if (B->in_flight == 2) {
    absorb_both(&B->a, &B->b, B->a.blocks < B->b.blocks ? B->a.blocks : B->b.blocks);
    finish(B, &B->a, open);
    finish(B, &B->b, open);
  } else if (B->in_flight == 1) {
    finish(B, &B->a, open);
  }
  B->in_flight = 0;
}

TARGET TSN_INLINE void start_one(batch *B, poly_stream *s, const int open) {
  aead_packet *p = &B->packets[B->authenticated];
  poly_start(s, B->keys[B->authenticated % SLOTS], open ? p->src : p->dst, p->bytes, B->authenticated);
  B->authenticated++;
}

TARGET TSN_INLINE void start_streams(batch *B, const int open) {
  uint32_t first = B->authenticated;
  if (B->in_flight || first >= B->count) return;
  if (first + 1 < B->count && first + 1 < B->keyed && (open || first + 1 < B->done)) {
    start_one(B, &B->a, open);
    start_one(B, &B->b, open);
    B->in_flight = 2;
  } else if (first + 1 == B->count && first < B->keyed) {
    start_one(B, &B->a, open);
    B->in_flight = 1;
  }
}

#if LANES == 8
TARGET TSN_INLINE void transpose(uint8_t *out, LANE_T a, LANE_T b, LANE_T c, LANE_T d, LANE_T e, LANE_T f, LANE_T g,
                                 LANE_T h) {
#define LO32(x, y) _mm256_unpacklo_epi32((__m256i)(x), (__m256i)(y))
#define HI32(x, y) _mm256_unpackhi_epi32((__m256i)(x), (__m256i)(y))
  __m256i t0 = LO32(a, b), t1 = HI32(a, b), t2 = LO32(c, d), t3 = HI32(c, d);
  __m256i t4 = LO32(e, f), t5 = HI32(e, f), t6 = LO32(g, h), t7 = HI32(g, h);
#undef LO32
#undef HI32
  __m256i s0 = _mm256_unpacklo_epi64(t0, t2), s1 = _mm256_unpackhi_epi64(t0, t2), s2 = _mm256_unpacklo_epi64(t1, t3);
  __m256i s3 = _mm256_unpackhi_epi64(t1, t3), s4 = _mm256_unpacklo_epi64(t4, t6), s5 = _mm256_unpackhi_epi64(t4, t6);
  __m256i s6 = _mm256_unpacklo_epi64(t5, t7), s7 = _mm256_unpackhi_epi64(t5, t7);
  __m256i *o = (__m256i *)out;
  _mm256_store_si256(o, _mm256_permute2x128_si256(s0, s4, 0x20));
  _mm256_store_si256(o + 2, _mm256_permute2x128_si256(s1, s5, 0x20));
  _mm256_store_si256(o + 4, _mm256_permute2x128_si256(s2, s6, 0x20));
  _mm256_store_si256(o + 6, _mm256_permute2x128_si256(s3, s7, 0x20));
  _mm256_store_si256(o + 8, _mm256_permute2x128_si256(s0, s4, 0x31));
  _mm256_store_si256(o + 10, _mm256_permute2x128_si256(s1, s5, 0x31));
  _mm256_store_si256(o + 12, _mm256_permute2x128_si256(s2, s6, 0x31));
  _mm256_store_si256(o + 14, _mm256_permute2x128_si256(s3, s7, 0x31));
}
#endif

/* Key stream of LANES blocks, with up to `pairs` steps of (2 blocks of a, 2 of b) or `singles` steps of (3 blocks of a)
 * of Poly1305 woven in: one per double round. */
TARGET static __attribute__((noinline)) void make_stream(const uint32_t *key, const uint32_t *counters, uint8_t *out,
                                                         poly_stream *A, poly_stream *B, uint32_t pairs,
                                                         uint32_t singles) {
  LANE_T zero = {0};
#define SPREAD(i) (zero + key[i])
  LANE_T x0 = zero + SIGMA0, x1 = zero + SIGMA1, x2 = zero + SIGMA2, x3 = zero + SIGMA3;
  LANE_T x4 = SPREAD(0), x5 = SPREAD(1), x6 = SPREAD(2), x7 = SPREAD(3);
  LANE_T x8 = SPREAD(4), x9 = SPREAD(5), x10 = SPREAD(6), x11 = SPREAD(7);
#undef SPREAD
  LANE_T x12 = *(const LANE_T *)counters, x13 = zero, x14 = *(const LANE_T *)(counters + LANES);
  LANE_T x15 = *(const LANE_T *)(counters + 2 * LANES);
  uint32_t i = 0;
  if (pairs) {
    uint64_t a0 = A->h0, a1 = A->h1, a2 = A->h2, b0 = B->h0, b1 = B->h1, b2 = B->h2;
    const uint64_t ar[3] = {A->r[0], A->r[1], A->r[2]}, br[3] = {B->r[0], B->r[1], B->r[2]};
    const uint8_t *p = A->at, *q = B->at;
    for (; i < pairs; i++, p += 32, q += 32) {
      COLUMNS POLY(a, p);
      POLY(b, q);
      DIAGONALS POLY(a, p + 16);
      POLY(b, q + 16);
    }
    A->h0 = a0, A->h1 = a1, A->h2 = a2, A->at = p, A->blocks -= 2 * pairs;
    B->h0 = b0, B->h1 = b1, B->h2 = b2, B->at = q, B->blocks -= 2 * pairs;
  } else if (singles) {
    uint64_t a0 = A->h0, a1 = A->h1, a2 = A->h2;
    const uint64_t ar[3] = {A->r[0], A->r[1], A->r[2]};
    const uint8_t *p = A->at;
    for (; i < singles; i++, p += 48) {
      COLUMNS POLY(a, p);
      POLY(a, p + 16);
      DIAGONALS POLY(a, p + 32);
    }
    A->h0 = a0, A->h1 = a1, A->h2 = a2, A->at = p, A->blocks -= 3 * singles;
  }
  for (; i < 10; i++) {
    COLUMNS DIAGONALS
  }
  x0 += SIGMA0, x1 += SIGMA1, x2 += SIGMA2, x3 += SIGMA3;
  x4 += key[0], x5 += key[1], x6 += key[2], x7 += key[3], x8 += key[4], x9 += key[5], x10 += key[6], x11 += key[7];
  x12 += *(const LANE_T *)counters, x14 += *(const LANE_T *)(counters + LANES);
  x15 += *(const LANE_T *)(counters + 2 * LANES);
#if LANES == 8
  transpose(out, x0, x1, x2, x3, x4, x5, x6, x7);
  transpose(out + 32, x8, x9, x10, x11, x12, x13, x14, x15);
#else
  const LANE_T words[16] = {x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15};
  for (int w = 0; w < 16; w++)
    for (int l = 0; l < LANES; l++) store_le32(out + l * 64 + w * 4, words[w][l]);
#endif
}

TARGET TSN_INLINE void xor_block(const uint8_t *stream, const uint8_t *src, uint8_t *dst, uint32_t bytes) {
#if LANES == 8
  if (bytes == 64) {
    const __m256i *k = (const __m256i *)stream, *s = (const __m256i *)src;
    __m256i low = _mm256_xor_si256(_mm256_load_si256(k), _mm256_loadu_si256(s));
    __m256i high = _mm256_xor_si256(_mm256_load_si256(k + 1), _mm256_loadu_si256(s + 1));
    _mm256_storeu_si256((__m256i *)dst, low);
    _mm256_storeu_si256((__m256i *)dst + 1, high);
    return;
  }
#endif
  uint32_t i = 0;
  for (; i + 16 <= bytes; i += 16) {
    uint64_t low = load_le64(src + i) ^ load_le64(stream + i), high = load_le64(src + i + 8) ^ load_le64(stream + i + 8);
    store_le64(dst + i, low);
    store_le64(dst + i + 8, high);
  }
  for (; i < bytes; i++) dst[i] = src[i] ^ stream[i];
}

/* The plaintext block at `offset` of a packet that is being sealed, gathered from head, src and zero padding. */
TARGET TSN_INLINE const uint8_t *plain_block(const aead_packet *p, uint32_t offset, uint32_t bytes, uint8_t *scratch) {
  uint32_t end = p->head_bytes + p->src_bytes, filled = 0;
  if (offset >= p->head_bytes && offset + bytes <= end) return p->src + (offset - p->head_bytes);
  if (offset < p->head_bytes) {
    filled = p->head_bytes - offset < bytes ? p->head_bytes - offset : bytes;
    memcpy(scratch, p->head + offset, filled);
  }
  if (offset + filled < end) {
    uint32_t more = end - offset - filled;
    if (more > bytes - filled) more = bytes - filled;
    copy_bytes(scratch + filled, p->src + (offset + filled - p->head_bytes), more);
    filled += more;
  }
  memset(scratch + filled, 0, bytes - filled);
  return scratch;
}

TARGET TSN_INLINE void set_counter(batch *B, uint32_t at, uint32_t block, uint64_t counter) {
  B->counters[at] = block;
  B->counters[LANES + at] = (uint32_t)counter;
  B->counters[2 * LANES + at] = (uint32_t)(counter >> 32);
}

TARGET TSN_INLINE void advance(batch *B, uint32_t bytes) {
  B->offset += bytes;
  if (B->offset >= B->packets[B->current].bytes) {
    B->current++;
    B->offset = 0;
  }
}

/* Whether the next LANES blocks all lie in one packet, and in one place. */
TARGET TSN_INLINE int fill_whole(batch *B, const int open) {
  if (B->lane_count || B->current >= B->group_end) return 0;
  const aead_packet *p = &B->packets[B->current];
  uint32_t offset = B->offset, bytes = LANES * 64;
  if (p->bytes - offset < bytes) return 0;
  if (!open && (offset < p->head_bytes || offset + bytes > p->head_bytes + p->src_bytes)) return 0;
  B->whole_src = p->src + offset - (open ? 0 : p->head_bytes);
  B->whole_dst = p->dst + offset;
  LANE_T zero = {0};
  *(LANE_T *)B->counters = zero + (offset / 64 + 1) + *(const LANE_T *)iota;
  *(LANE_T *)(B->counters + LANES) = zero + (uint32_t)p->counter;
  *(LANE_T *)(B->counters + 2 * LANES) = zero + (uint32_t)(p->counter >> 32);
  B->lanes[LANES - 1] = (lane){.dst = B->whole_dst + (LANES - 1) * 64, .bytes = 64, .packet = B->current};
  B->lane_count = LANES;
  advance(B, bytes);
  return 1;
}

TARGET TSN_INLINE void fill_lanes(batch *B, const int open) {
  B->lane_count = 0;
  B->whole_src = NULL;
  if (B->current == B->group_end) B->group_end = B->count - B->group_end > GROUP ? B->group_end + GROUP : B->count;
  for (; B->lane_count < LANES && B->asked < B->group_end; B->asked++)
    set_counter(B, B->lane_count++, 0, B->packets[B->asked].counter);
  B->key_lanes = B->lane_count;
  if (fill_whole(B, open)) return;
  while (B->lane_count < LANES && B->current < B->group_end) {
    const aead_packet *p = &B->packets[B->current];
    uint32_t offset = B->offset, bytes = p->bytes - offset > 64 ? 64 : p->bytes - offset, at = B->lane_count;
    if (bytes) {
      set_counter(B, at, offset / 64 + 1, p->counter);
      B->lanes[at] = (lane){.src = open ? p->src + offset : plain_block(p, offset, bytes, B->gather[at]),
                            .dst = p->dst + offset,
                            .bytes = bytes,
                            .packet = B->current};
      B->lane_count++;
    }
    advance(B, 64);
  }
  for (uint32_t i = B->lane_count; i < LANES; i++) set_counter(B, i, 0, 0);
}

/* How much Poly1305 can be woven into this batch of ChaCha20. */
TARGET TSN_INLINE void plan_poly(batch *B, const int open, uint32_t first_key, uint32_t *pairs, uint32_t *singles) {
  for (;;) {
    if (B->in_flight == 2 && (B->a.blocks < 2 || B->b.blocks < 2)) close_streams(B, open);
    start_streams(B, open);
    if (B->in_flight != 2) break;
    int keys_go = B->key_lanes && B->a.packet + GROUP < first_key; /* their slots are about to be reused */
    uint32_t fewer = B->a.blocks < B->b.blocks ? B->a.blocks : B->b.blocks;
    int behind = !open && fewer < 20 && B->authenticated + 1 < B->done;
    if (!keys_go && !behind) break;
    close_streams(B, open);
  }
  if (B->in_flight == 2) {
    uint32_t fewer = (B->a.blocks < B->b.blocks ? B->a.blocks : B->b.blocks) / 2;
    *pairs = fewer > 10 ? 10 : fewer;
  } else if (B->in_flight == 1) {
    uint32_t ready = B->a.blocks;
    if (!open && B->a.packet >= B->done) {
      uint32_t at = (uint32_t)(B->a.at - B->packets[B->a.packet].dst) / 16;
      uint32_t limit = B->a.packet == B->done ? B->done_offset / 16 : 0, written = limit > at ? limit - at : 0;
      if (written < ready) ready = written;
    }
    *singles = ready / 3 > 10 ? 10 : ready / 3;
  }
}

TARGET TSN_INLINE void absorb_until(poly_stream *s, const uint8_t *start, uint32_t block) {
  uint32_t at = (uint32_t)(s->at - start) / 16;
  if (block <= at) return;
  absorb(s, block - at < s->blocks ? block - at : s->blocks);
}

/* An open may write where it reads: Poly1305 has to be past everything that this batch overwrites. */
TARGET TSN_INLINE void poly_ahead(batch *B, const int open) {
  const lane *last = &B->lanes[B->lane_count - 1];
  uint32_t packet = last->packet;
  const aead_packet *p = &B->packets[packet];
  uint32_t block = (uint32_t)(last->dst - p->dst) / 16 + (last->bytes + 15) / 16;
  while (!B->in_flight && B->authenticated <= packet) start_streams(B, open);
  while (B->in_flight && B->a.packet <= packet) {
    if (B->in_flight == 1 ? B->a.packet != packet : B->b.packet < packet) {
      close_streams(B, open);
      start_streams(B, open);
      continue;
    }
    if (B->in_flight == 1) {
      absorb_until(&B->a, p->src, block);
    } else if (B->b.packet == packet) {
      absorb_both(&B->a, &B->b, B->a.blocks < B->b.blocks ? B->a.blocks : B->b.blocks);
      if (B->a.blocks) absorb(&B->a, B->a.blocks);
      absorb_until(&B->b, p->src, block);
    } else {
      uint32_t at = (uint32_t)(B->a.at - p->src) / 16, need = block > at ? block - at : 0;
      if (need > B->a.blocks) need = B->a.blocks;
      absorb_both(&B->a, &B->b, need < B->b.blocks ? need : B->b.blocks);
      absorb_until(&B->a, p->src, block);
    }
    break;
  }
}

TARGET TSN_INLINE void write_lanes(batch *B) {
  const uint8_t *src = B->whole_src;
  uint8_t *dst = B->whole_dst;
  if (src) {
    for (uint32_t i = 0; i < LANES * 64; i += 64) xor_block(B->stream + i, src + i, dst + i, 64);
    return;
  }
  for (uint32_t i = B->key_lanes, end = B->lane_count; i < end; i++) {
    const lane l = B->lanes[i];
    xor_block(B->stream + 64 * i, l.src, l.dst, l.bytes);
  }
}

/* Keys of up to GROUP packets first, then their data, LANES blocks at a time. Poly1305 runs over pairs of packets,
 * behind ChaCha20 when sealing, ahead of it when opening. */
TARGET TSN_INLINE void run_batch(const aead_key *key, aead_packet *packets, size_t count, const int open) {
  batch B;
  B.packets = packets, B.count = (uint32_t)count;
  B.in_flight = B.authenticated = B.keyed = B.asked = B.group_end = 0;
  B.current = B.offset = B.done = B.done_offset = 0;
  while (B.current < B.count || B.asked < B.count) {
    uint32_t first_key = B.asked, pairs = 0, singles = 0;
    fill_lanes(&B, open);
    plan_poly(&B, open, first_key, &pairs, &singles);
    make_stream(key->words, B.counters, B.stream, &B.a, &B.b, pairs, singles);
    for (uint32_t i = 0; i < B.key_lanes; i++) memcpy(B.keys[(first_key + i) % SLOTS], B.stream + 64 * i, 32);
    B.keyed = B.asked;
    if (open && B.lane_count > B.key_lanes) poly_ahead(&B, open);
    write_lanes(&B);
    B.done = B.current, B.done_offset = B.offset;
  }
  while (B.in_flight || B.authenticated < B.count) {
    close_streams(&B, open);
    start_streams(&B, open);
  }
  wipe(&B, offsetof(batch, lanes));
  wipe(&B.a, sizeof B.a + sizeof B.b);
}

/* One copy for each direction. */
TARGET static __attribute__((noinline)) void run_seal(const aead_key *key, aead_packet *packets, size_t count) {
  run_batch(key, packets, count, 0);
}

TARGET static __attribute__((noinline)) void run_open(const aead_key *key, aead_packet *packets, size_t count) {
  run_batch(key, packets, count, 1);
}

TARGET void KERNEL_RUN(const aead_key *key, aead_packet *packets, size_t count, int open) {
  (open ? run_open : run_seal)(key, packets, count);
}

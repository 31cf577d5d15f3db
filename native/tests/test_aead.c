/* Differential test of the batch kernels against OpenSSL (found at run time, else against each other), and a benchmark.
 * usage: test_aead [packets] [kernel]     test_aead bench [kernel] */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "../src/aead.h"
#include "evp.h"

#define MOST 64
#define LONGEST 2049

static uint64_t random_state = 88172645463325252ull;
static uint8_t plain[MOST][LONGEST + 64], sealed[MOST][LONGEST + 64], want[MOST][LONGEST + 64], opened[MOST][LONGEST + 64];
static evp oracle;
static int has_oracle;
static const aead_kernel *reference;

static uint64_t next_random(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545F4914F6CDD1Dull;
}

static uint32_t below(uint32_t n) { return (uint32_t)((next_random() >> 33) % n); }

static void fill(uint8_t *p, size_t n) {
  for (size_t i = 0; i < n; i++) p[i] = (uint8_t)(next_random() >> 40);
}

static void fail(const char *what, const char *kernel, uint32_t bytes) {
  printf("FAIL %s: %s of %u bytes\n", kernel, what, bytes);
  exit(1);
}

static void oracle_seal(const aead_key *key, uint64_t counter, const uint8_t *in, uint8_t *out, uint32_t bytes) {
  if (has_oracle) {
    evp_seal(&oracle, counter, in, out, (int)bytes);
    return;
  }
  aead_packet p = {.src = in, .src_bytes = bytes, .bytes = bytes, .dst = out, .counter = counter};
  aead_seal(reference, key, &p, 1);
}

static uint32_t pick_length(int style, uint32_t base, int is_last) {
  static uint32_t sequence;
  switch (style) {
    case 0: return below(LONGEST);
    case 1: return base;
    case 2: return is_last ? below(base + 1) : base;
    case 3: return sequence++ % LONGEST;
    default: return below(100);
  }
}

static void make_packet(aead_packet *p, uint8_t *from, uint8_t *to, uint32_t bytes, int in_place) {
  uint32_t head = below(2) ? below(bytes + 1) : 0, pad = below(2) ? below(16) : 0;
  if (head > 200) head = below(200);
  if (pad + head > bytes) pad = 0;
  memset(from + bytes - pad, 0, pad);
  *p = (aead_packet){.head = from, .src = from + head, .dst = to, .head_bytes = head, .src_bytes = bytes - head - pad,
                     .bytes = bytes, .counter = below(8) ? next_random() >> below(64) : ~0ull - below(4)};
  if (in_place && !head && !pad) {
    memcpy(to, from, bytes);
    p->src = to;
  }
}

static uint32_t one_batch(const aead_kernel *kernel, uint32_t *tampered) {
  uint8_t raw[32];
  aead_key key;
  aead_packet packets[MOST];
  int bad[MOST], style = (int)below(5), in_place = (int)below(2);
  uint32_t count = 1 + below(below(2) ? 8 : 50), base = below(LONGEST);
  fill(raw, 32);
  if (!below(16)) memset(raw, 255, 32);
  aead_set_key(&key, raw);
  if (has_oracle) evp_key(&oracle, raw);
  for (uint32_t i = 0; i < count; i++) {
    uint32_t bytes = pick_length(style, base, i == count - 1);
    fill(plain[i], bytes);
    if (!below(64)) memset(plain[i], 255, bytes);
    make_packet(&packets[i], plain[i], sealed[i], bytes, in_place);
    oracle_seal(&key, packets[i].counter, plain[i], want[i], bytes);
  }
  aead_seal(kernel, &key, packets, count);
  for (uint32_t i = 0; i < count; i++)
    if (memcmp(sealed[i], want[i], packets[i].bytes + 16)) fail("seal", kernel->name, packets[i].bytes);
  in_place = (int)below(2);
  for (uint32_t i = 0; i < count; i++) {
    bad[i] = !below(8);
    if (bad[i]) sealed[i][below(packets[i].bytes + 16)] ^= (uint8_t)(1 << below(8));
    *tampered += (uint32_t)bad[i];
    packets[i] = (aead_packet){.src = sealed[i], .dst = in_place ? sealed[i] : opened[i], .bytes = packets[i].bytes,
                               .counter = packets[i].counter, .ok = 7};
  }
  aead_open(kernel, &key, packets, count);
  for (uint32_t i = 0; i < count; i++) {
    if (packets[i].ok != (uint32_t)!bad[i]) fail("verdict", kernel->name, packets[i].bytes);
    if (!bad[i] && memcmp(packets[i].dst, plain[i], packets[i].bytes)) fail("open", kernel->name, packets[i].bytes);
    for (uint32_t j = 0; bad[i] && j < packets[i].bytes; j++)
      if (packets[i].dst[j]) fail("leak", kernel->name, packets[i].bytes);
  }
  return count;
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double time_evp(uint32_t bytes, uint32_t count) {
  uint32_t rounds = 2000000 / (count * (bytes + 300));
  double start = seconds();
  for (uint32_t r = 0; r < rounds; r++)
    for (uint32_t i = 0; i < count; i++) evp_seal(&oracle, i, plain[i], want[i], (int)bytes);
  return (seconds() - start) / rounds / count * 1e9;
}

static double time_kernel(const aead_kernel *kernel, const aead_key *key, uint32_t bytes, uint32_t count, int open) {
  uint32_t rounds = 2000000 / (count * (bytes + 300));
  aead_packet packets[MOST];
  double start = seconds();
  for (uint32_t r = 0; r < rounds; r++) {
    for (uint32_t i = 0; i < count; i++)
      packets[i] = open ? (aead_packet){.src = want[i], .dst = opened[i], .bytes = bytes, .counter = i}
                        : (aead_packet){.src = plain[i], .dst = sealed[i], .src_bytes = bytes, .bytes = bytes, .counter = i};
    (open ? aead_open : aead_seal)(kernel, key, packets, count);
  }
  for (uint32_t i = 0; open && i < count; i++)
    if (!packets[i].ok) fail("benchmark", kernel->name, bytes);
  return (seconds() - start) / rounds / count * 1e9;
}

static void keep_best(double *best, double now) {
  if (!*best || now < *best) *best = now;
}

/* One JSON line per size and batch; contenders alternate in slices of about a millisecond, best of 100. */
static int bench(const aead_kernel *kernel) {
  static const uint32_t sizes[] = {32, 96, 512, 1296}, counts[] = {44, 1};
  uint8_t raw[32] = {1, 2, 3};
  aead_key key;
  aead_set_key(&key, raw);
  if (has_oracle) evp_key(&oracle, raw);
  for (unsigned c = 0; c < 2; c++)
    for (unsigned s = 0; s < 4; s++) {
      double evp_ns = 0, seal_ns = 0, open_ns = 0;
      for (uint32_t i = 0; i < counts[c]; i++) oracle_seal(&key, i, plain[i], want[i], sizes[s]);
      for (int round = 0; round < 100; round++) {
        if (has_oracle) keep_best(&evp_ns, time_evp(sizes[s], counts[c]));
        keep_best(&seal_ns, time_kernel(kernel, &key, sizes[s], counts[c], 0));
        keep_best(&open_ns, time_kernel(kernel, &key, sizes[s], counts[c], 1));
      }
      printf("{\"kernel\": \"%s\", \"bytes\": %u, \"batch\": %u, \"seal_ns\": %.1f, \"open_ns\": %.1f, \"evp_ns\": %.1f}\n",
             kernel->name, sizes[s], counts[c], seal_ns, open_ns, evp_ns);
    }
  return 0;
}

int main(int argc, char **argv) {
  const char *only = argc > 2 ? argv[2] : NULL;
  static const char *const names[] = {"portable", "avx2"};
  has_oracle = evp_load(&oracle) == 0;
  reference = aead_find("portable");
  if (argc > 1 && !strcmp(argv[1], "bench")) {
    const aead_kernel *kernel = aead_find(only);
    return kernel ? bench(kernel) : 2;
  }
  uint32_t packets = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 50000;
  for (unsigned i = 0; i < 2; i++) {
    const aead_kernel *kernel = aead_find(names[i]);
    if (!kernel || (only && strcmp(only, names[i]))) continue;
    int broken = aead_self_test(kernel);
    if (broken) {
      printf("FAIL %s: self-test check %d\n", kernel->name, broken);
      return 1;
    }
    uint32_t done = 0, tampered = 0;
    while (done < packets) done += one_batch(kernel, &tampered);
    printf("%s: %u packets sealed and opened like %s, %u tampered ones refused\n", kernel->name, done,
           has_oracle ? "OpenSSL" : "the portable kernel", tampered);
  }
  return 0;
}

/* Choice of the batch kernel by CPU, the known-answer self-test, and the two verbs. */
#include "aead.h"

#include "bits.h"

void aead_run_portable(const aead_key *key, aead_packet *packets, size_t count, int open);
void aead_run_avx2(const aead_key *key, aead_packet *packets, size_t count, int open);

static const aead_kernel portable = {"portable", aead_run_portable};
#if defined(__x86_64__)
static const aead_kernel avx2 = {"avx2", aead_run_avx2};
#endif

void aead_set_key(aead_key *key, const uint8_t raw[AEAD_KEY_BYTES]) { memcpy(key->words, raw, AEAD_KEY_BYTES); }

const aead_kernel *aead_find(const char *name) {
  int any = !name || !*name;
#if defined(__x86_64__)
  int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  if (has_avx2 && (any || !strcmp(name, avx2.name))) return &avx2;
#endif
  return any || !strcmp(name, portable.name) ? &portable : NULL;
}

void aead_seal(const aead_kernel *kernel, const aead_key *key, aead_packet *packets, size_t count) {
  if (count) kernel->run(key, packets, count, 0);
}

void aead_open(const aead_kernel *kernel, const aead_key *key, aead_packet *packets, size_t count) {
  if (!count) return;
  kernel->run(key, packets, count, 1);
  for (size_t i = 0; i < count; i++)
    if (!packets[i].ok && packets[i].bytes) memset(packets[i].dst, 0, packets[i].bytes);
}

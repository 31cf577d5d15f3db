/* OpenSSL's ChaCha20-Poly1305 by dlopen: oracle and yardstick of the tests, never a dependency of the build. */
#ifndef TSN_TESTS_EVP_H
#define TSN_TESTS_EVP_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
  void *(*ctx_new)(void);
  const void *(*cipher)(void);
  int (*init)(void *, const void *, void *, const uint8_t *, const uint8_t *);
  int (*update)(void *, uint8_t *, int *, const uint8_t *, int);
  int (*final)(void *, uint8_t *, int *);
  int (*ctrl)(void *, int, int, void *);
  void *ctx;
} evp;

static inline int evp_load(evp *e) {
  static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so", "libcrypto.3.dylib"};
  void *library = NULL;
  for (unsigned i = 0; i < sizeof names / sizeof *names && !library; i++) library = dlopen(names[i], RTLD_NOW);
  if (!library) return -1;
  *(void **)&e->ctx_new = dlsym(library, "EVP_CIPHER_CTX_new");
  *(void **)&e->cipher = dlsym(library, "EVP_chacha20_poly1305");
  *(void **)&e->init = dlsym(library, "EVP_EncryptInit_ex");
  *(void **)&e->update = dlsym(library, "EVP_EncryptUpdate");
  *(void **)&e->final = dlsym(library, "EVP_EncryptFinal_ex");
  *(void **)&e->ctrl = dlsym(library, "EVP_CIPHER_CTX_ctrl");
  if (!e->ctx_new || !e->cipher || !e->init || !e->update || !e->final || !e->ctrl) return -1;
  e->ctx = e->ctx_new();
  return e->ctx && e->init(e->ctx, e->cipher(), NULL, NULL, NULL) ? 0 : -1;
}

static inline void evp_key(evp *e, const uint8_t key[32]) { e->init(e->ctx, NULL, NULL, key, NULL); }

static inline void evp_seal(evp *e, uint64_t counter, const uint8_t *in, uint8_t *out, int bytes) {
  uint8_t iv[12] = {0};
  int n = 0, ignored = 0;
  memcpy(iv + 4, &counter, 8);
  e->init(e->ctx, NULL, NULL, NULL, iv);
  e->update(e->ctx, out, &n, in, bytes);
  e->final(e->ctx, out + n, &ignored);
  e->ctrl(e->ctx, 0x10 /* AEAD_GET_TAG */, 16, out + bytes);
}

#endif

/* The ring from the pump's threads to Python: many writers, one reader, messages of any size, never waiting for room. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "fdinternal.h"

#if FD_LINUX
#include <sys/eventfd.h>

int wake_open(int wake[2]) {
  wake[0] = wake[1] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return wake[0] < 0 ? -1 : 0;
}
#else
int wake_open(int wake[2]) {
  if (pipe(wake)) return -1;
  for (int i = 0; i < 2; i++) {
    fcntl(wake[i], F_SETFL, O_NONBLOCK);
    fcntl(wake[i], F_SETFD, FD_CLOEXEC);
  }
  return 0;
}
#endif

void wake_close(int wake[2]) {
  if (wake[0] < 0) return;
  close(wake[0]);
  if (wake[1] != wake[0]) close(wake[1]);
  wake[0] = wake[1] = -1;
}

void wake_ring(const int wake[2]) {
  uint64_t one = 1;
  while (write(wake[1], &one, sizeof one) < 0 && errno == EINTR) continue; /* full: it is readable anyway */
}

void wake_clear(const int wake[2]) {
  uint64_t drained;
  while (read(wake[0], &drained, sizeof drained) == sizeof drained && wake[0] != wake[1]) continue;
}

int ring_init(up_ring *r, uint32_t bytes) {
  r->capacity = 1u << 16;
  while (r->capacity < bytes && r->capacity < 1u << 30) r->capacity *= 2;
  r->memory = malloc(r->capacity);
  r->wake[0] = r->wake[1] = -1;
  if (!r->memory || wake_open(r->wake)) return -1;
  return pthread_mutex_init(&r->lock, NULL) ? -1 : 0;
}

void ring_free(up_ring *r) {
  if (r->memory) {
    wipe(r->memory, r->capacity);
    pthread_mutex_destroy(&r->lock);
  }
  free(r->memory);
  wake_close(r->wake);
}

static void put_bytes(up_ring *r, const void *data, uint32_t bytes) {
  uint32_t at = (uint32_t)(r->head & (r->capacity - 1)), first = r->capacity - at < bytes ? r->capacity - at : bytes;
  copy_bytes(r->memory + at, data, first);
  copy_bytes(r->memory, (const uint8_t *)data + first, bytes - first);
  r->head += bytes;
}

static void get_bytes(const up_ring *r, uint64_t from, void *out, uint32_t bytes) {
  uint32_t at = (uint32_t)(from & (r->capacity - 1)), first = r->capacity - at < bytes ? r->capacity - at : bytes;
  copy_bytes(out, r->memory + at, first);
  copy_bytes((uint8_t *)out + first, r->memory, bytes - first);
}

int ring_put(up_ring *r, const up_message *m, const struct iovec *parts, int part_count) {
  pthread_mutex_lock(&r->lock);
  int fits = r->capacity - (r->head - r->tail) >= sizeof *m + m->bytes, rings = 0;
  if (fits) {
    put_bytes(r, m, sizeof *m);
    for (int i = 0; i < part_count; i++) put_bytes(r, parts[i].iov_base, (uint32_t)parts[i].iov_len);
    rings = !r->signalled;
    r->signalled = 1;
  }
  pthread_mutex_unlock(&r->lock);
  if (rings) wake_ring(r->wake);
  return fits ? 0 : -1;
}

int fdpump_up_fd(const fdpump *p) { return p->ring.wake[0]; }

void fdpump_up_clear(fdpump *p) {
  wake_clear(p->ring.wake);
  pthread_mutex_lock(&p->ring.lock);
  p->ring.signalled = 0;
  pthread_mutex_unlock(&p->ring.lock);
}

void fdpump_up_again(fdpump *p) {
  pthread_mutex_lock(&p->ring.lock);
  p->ring.signalled = 1;
  pthread_mutex_unlock(&p->ring.lock);
  wake_ring(p->ring.wake);
}

int fdpump_up_peek(fdpump *p, up_message *m) {
  up_ring *r = &p->ring;
  pthread_mutex_lock(&r->lock);
  int any = r->head != r->tail;
  if (any) get_bytes(r, r->tail, m, sizeof *m);
  pthread_mutex_unlock(&r->lock);
  return any;
}

void fdpump_up_take(fdpump *p, uint8_t *out) {
  up_ring *r = &p->ring;
  up_message m;
  pthread_mutex_lock(&r->lock);
  if (r->head != r->tail) {
    get_bytes(r, r->tail, &m, sizeof m);
    get_bytes(r, r->tail + sizeof m, out, m.bytes);
    r->tail += sizeof m + m.bytes;
  }
  pthread_mutex_unlock(&r->lock);
}

static int put(fdpump *p, const up_message *m, const struct iovec *parts, int part_count) {
  int lost = ring_put(&p->ring, m, parts, part_count);
  count(p, lost ? FD_UP_OVERFLOW : FD_UP_MESSAGES, 1);
  return lost;
}

int up_simple(fdpump *p, enum up_kind kind, int64_t peer, uint32_t detail) {
  up_message m = {.kind = (uint8_t)kind, .peer = peer, .detail = detail};
  return put(p, &m, NULL, 0);
}

void up_bytes(fdpump *p, enum up_kind kind, int64_t peer, uint32_t unit, const struct iovec *parts, int part_count) {
  up_message m = {.kind = (uint8_t)kind, .peer = peer, .unit = unit};
  for (int i = 0; i < part_count; i++) m.bytes += (uint32_t)parts[i].iov_len;
  put(p, &m, parts, part_count);
}

static void set_source(up_message *m, const struct sockaddr_storage *source) {
  if (source->ss_family == AF_INET) {
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)source;
    m->family = 4;
    m->port = ntohs(v4->sin_port);
    memcpy(m->ip, &v4->sin_addr, 4);
  } else if (source->ss_family == AF_INET6) {
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)source;
    m->family = 6;
    m->port = ntohs(v6->sin6_port);
    m->scope = v6->sin6_scope_id;
    memcpy(m->ip, &v6->sin6_addr, 16);
  }
}

void up_from(fdpump *p, enum up_kind kind, int64_t peer, uint32_t detail, const struct sockaddr_storage *source,
             const uint8_t *data, uint32_t bytes) {
  up_message m = {.kind = (uint8_t)kind, .peer = peer, .detail = detail, .bytes = bytes};
  union {
    const uint8_t *from;
    void *base;
  } part = {data};
  struct iovec whole = {part.base, bytes};
  set_source(&m, source);
  put(p, &m, &whole, bytes > 0);
}

/* What Python hears about peers, often enough for timers and paths and not with every batch.
 *
 * Attention: at once, then at most every ATTENTION_GAP_S; what came meanwhile is told when the gap is over, so that the
 * last change is never kept back. Heard: when the source is another one, else once in HEARD_GAP_S. */
#include <stdlib.h>

#include "fdinternal.h"

#define ATTENTION_GAP_S 0.2
#define HEARD_GAP_S 1.0

#define ERROR_GAP_S 1.0

static peer_note *note_of(fdpump *p, int64_t handle) {
  peer_note *n = table_get(&p->notes, (uint64_t)handle);
  if (n || !(n = calloc(1, sizeof *n))) return n;
  n->peer = handle;
  n->last_attention = n->last_report = n->last_error = -1e9;
  if (!table_put(&p->notes, (uint64_t)handle, n)) return n;
  free(n);
  return NULL;
}

static void keep_for_later(fdpump *p, peer_note *n) {
  if (!n || n->attention_due) return;
  n->attention_due = 1;
  atomic_fetch_add(&p->attention_due, 1);
}

void up_attention(fdpump *p, const int64_t *peers, size_t peer_count, double now) {
  if (!peer_count) return;
  pthread_mutex_lock(&p->notes_lock);
  for (size_t i = 0; i < peer_count; i++) {
    peer_note *n = note_of(p, peers[i]);
    if (n && now - n->last_attention < ATTENTION_GAP_S) {
      keep_for_later(p, n);
      continue;
    }
    if (n) n->last_attention = now;
    if (up_simple(p, UP_ATTENTION, peers[i], 0)) keep_for_later(p, n);
  }
  pthread_mutex_unlock(&p->notes_lock);
}

void up_late_attention(fdpump *p, double (*clock)(void)) {
  if (!atomic_load_explicit(&p->attention_due, memory_order_relaxed)) return;
  double now = clock();
  pthread_mutex_lock(&p->notes_lock);
  for (uint32_t i = 0; now >= p->next_late && i < p->notes.capacity; i++) {
    peer_note *n = p->notes.slots[i].value;
    if (!n || !n->attention_due || now - n->last_attention < ATTENTION_GAP_S) continue;
    n->last_attention = now;
    if (up_simple(p, UP_ATTENTION, n->peer, 0)) continue;
    n->attention_due = 0;
    atomic_fetch_sub(&p->attention_due, 1);
  }
  if (now >= p->next_late) p->next_late = now + ATTENTION_GAP_S / 4; /* one walk per gap, however busy we are */
  pthread_mutex_unlock(&p->notes_lock);
}

void up_send_error(fdpump *p, int64_t peer, int error, const struct sockaddr_storage *target) {
  double now = fd_now();
  pthread_mutex_lock(&p->notes_lock);
  peer_note *n = note_of(p, peer);
  int tells = n && now - n->last_error >= ERROR_GAP_S;
  if (tells) n->last_error = now;
  pthread_mutex_unlock(&p->notes_lock);
  if (tells) up_from(p, UP_SEND_ERROR, peer, (uint32_t)error, target, NULL, 0);
}

static uint64_t hash_source(const struct sockaddr_storage *source) {
  uint64_t mixed = source->ss_family;
  if (source->ss_family == AF_INET) {
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)source;
    return mixed << 48 | (uint64_t)v4->sin_addr.s_addr << 16 | v4->sin_port;
  }
  const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)source;
  const uint8_t *ip = (const uint8_t *)&v6->sin6_addr;
  mixed = (mixed ^ load_le64(ip)) * 0x9E3779B97F4A7C15ull;
  return ((mixed ^ load_le64(ip + 8)) * 0x9E3779B97F4A7C15ull) ^ v6->sin6_port;
}

void up_heard(fdpump *p, int64_t peer, const struct sockaddr_storage *source, double now) {
  uint64_t from = hash_source(source);
  pthread_mutex_lock(&p->notes_lock);
  peer_note *n = note_of(p, peer);
  int tells = !n || n->source != from || now - n->last_report >= HEARD_GAP_S;
  if (n && tells) n->source = from, n->last_report = now;
  pthread_mutex_unlock(&p->notes_lock);
  if (tells) up_from(p, UP_HEARD, peer, 0, source, NULL, 0);
}

void fdpump_forget_peer(fdpump *p, int64_t peer) {
  pthread_mutex_lock(&p->notes_lock);
  peer_note *n = table_get(&p->notes, (uint64_t)peer);
  if (n) {
    if (n->attention_due) atomic_fetch_sub(&p->attention_due, 1);
    table_remove(&p->notes, (uint64_t)peer);
    free(n);
  }
  pthread_mutex_unlock(&p->notes_lock);
}

void notes_forget(fdpump *p) {
  for (uint32_t i = 0; i < p->notes.capacity; i++) free(p->notes.slots[i].value);
  table_free(&p->notes);
}

/* Peers, sessions in their three slots, allowed IPs, activity. */
#include <stdlib.h>

#include "internal.h"

static const char *const drop_names[DROP_COUNT] = {"malformed", "no_peer", "too_big", "no_session",   "expired",   "auth",
                                                   "replay",    "source",  "short",   "unknown_type", "bad_length"};

const char *core_drop_name(int drop) { return drop >= 0 && drop < DROP_COUNT ? drop_names[drop] : NULL; }

int reserve(void *array, size_t *capacity, size_t count, size_t element_bytes) {
  if (count <= *capacity) return 0;
  size_t more = *capacity * 2 > count ? *capacity * 2 : count;
  if (more < 64) more = 64;
  void *old, *moved;
  memcpy(&old, array, sizeof old);
  moved = realloc(old, more * element_bytes);
  if (!moved) return -1;
  memcpy(array, &moved, sizeof moved);
  *capacity = more;
  return 0;
}

int list_once(core *c, handle_list *list, peer *p, uint64_t *mark) {
  if (*mark == c->call) return 0;
  *mark = c->call;
  if (reserve(&list->values, &list->capacity, list->count + 1, sizeof *list->values)) return -1;
  list->values[list->count++] = p->handle;
  return 0;
}

void begin_call(core *c) {
  c->call++;
  c->touched = NULL;
  c->first_sender = c->last_sender = NULL;
  c->attention.count = c->authenticated.count = c->confirmed.count = 0;
}

uint32_t chain_job(core *c, session *s, uint32_t job) {
  if (s->work_call == c->call) {
    uint32_t former = s->work_last;
    s->work_last = job;
    return former;
  }
  s->work_call = c->call;
  s->work_first = s->work_last = job;
  s->next_touched = c->touched;
  c->touched = s;
  return NONE;
}

core *core_new(uint32_t mtu_bytes, const char *kernel_name) {
  const aead_kernel *kernel = aead_find(kernel_name);
  if (!kernel || aead_self_test(kernel)) return NULL;
  core *c = calloc(1, sizeof *c);
  if (!c) return NULL;
  c->kernel = kernel;
  c->mtu_bytes = mtu_bytes;
  return c;
}

const char *core_kernel_name(const core *c) { return c->kernel->name; }

const uint64_t *core_drops(const core *c) { return c->drops; }

peer *find_peer(const core *c, int64_t handle) { return table_get(&c->peers, (uint64_t)handle); }

int core_has_peer(const core *c, int64_t handle) { return find_peer(c, handle) != NULL; }

static void free_session(core *c, session *s) {
  if (!s) return;
  if (table_get(&c->sessions, s->local_index) == s) table_remove(&c->sessions, s->local_index);
  wipe(s, sizeof *s);
  free(s);
}

static void free_sessions(core *c, peer *p) {
  free_session(c, p->current);
  free_session(c, p->previous);
  free_session(c, p->next);
  p->current = p->previous = p->next = NULL;
}

int core_add_peer(core *c, int64_t handle) {
  if (find_peer(c, handle)) return 0;
  peer *p = calloc(1, sizeof *p);
  if (!p) return -1;
  p->handle = handle;
  if (!table_put(&c->peers, (uint64_t)handle, p)) return 0;
  free(p);
  return -1;
}

void core_remove_peer(core *c, int64_t handle) {
  peer *p = find_peer(c, handle);
  if (!p) return;
  free_sessions(c, p);
  allowed_clear(&c->allowed, &p->allowed);
  table_remove(&c->peers, (uint64_t)handle);
  free(p);
}

void core_free(core *c) {
  if (!c) return;
  allowed_free(&c->allowed);
  for (uint32_t i = 0; i < c->peers.capacity; i++) {
    peer *p = c->peers.slots[i].value;
    if (!p) continue;
    free_sessions(c, p);
    free(p);
  }
  if (c->plain) wipe(c->plain, c->plain_capacity);
  table_free(&c->peers);
  table_free(&c->sessions);
  coalesce_free(&c->coalescer);
  free(c->attention.values), free(c->authenticated.values), free(c->confirmed.values);
  free(c->jobs), free(c->sources), free(c->runs), free(c->refused);
  free(c->open_jobs), free(c->others), free(c->deliveries), free(c->plain);
  free(c);
}

void core_clear_allowed(core *c, int64_t handle) {
  peer *p = find_peer(c, handle);
  if (p) allowed_clear(&c->allowed, &p->allowed);
}

int core_add_allowed(core *c, int64_t handle, const uint8_t *address, uint32_t bytes, uint32_t prefix_bits) {
  peer *p = find_peer(c, handle);
  return p ? allowed_add(&c->allowed, &p->allowed, address, bytes, prefix_bits) : 0;
}

int core_route(const core *c, const uint8_t *address, uint32_t bytes, int64_t *handle) {
  if (bytes != 4 && bytes != 16) return 0;
  const peer *p = (const peer *)allowed_find(&c->allowed, address, bytes);
  if (p) *handle = p->handle;
  return p != NULL;
}

static void place_session(core *c, peer *p, session *s) {
  if (s->is_initiator) {
    free_session(c, p->previous);
    if (p->next) {
      free_session(c, p->current);
      p->previous = p->next;
      p->next = NULL;
    } else {
      p->previous = p->current;
    }
    p->current = s;
  } else {
    free_session(c, p->next);
    free_session(c, p->previous);
    p->next = s;
    p->previous = NULL;
  }
  p->activity.rekey_wanted = 0;
  p->activity.first_unanswered_send = p->activity.first_unreplied_receive = 0;
}

int core_install_session(core *c, int64_t handle, uint32_t local_index, uint32_t remote_index, const uint8_t send_key[32],
                         const uint8_t receive_key[32], int is_initiator, double now) {
  peer *p = find_peer(c, handle);
  if (!p) return 0;
  session *s = calloc(1, sizeof *s);
  if (!s) return -1;
  s->local_index = local_index;
  s->remote_index = remote_index;
  s->is_initiator = is_initiator;
  s->created = now;
  s->owner = p;
  aead_set_key(&s->send_key, send_key);
  aead_set_key(&s->receive_key, receive_key);
  place_session(c, p, s); /* first, so that a reused index of a dropped session is free */
  return table_put(&c->sessions, local_index, s);
}

void core_drop_sessions(core *c, int64_t handle) {
  peer *p = find_peer(c, handle);
  if (!p) return;
  free_sessions(c, p);
  p->activity.rekey_wanted = 0;
  p->activity.first_unanswered_send = p->activity.first_unreplied_receive = 0;
}

void core_get_activity(const core *c, int64_t handle, core_activity *out) {
  const peer *p = find_peer(c, handle);
  memset(out, 0, sizeof *out);
  if (!p) return;
  *out = p->activity;
  out->has_current = p->current != NULL;
  out->has_next = p->next != NULL;
  if (!p->current) return;
  out->session_created = p->current->created;
  out->is_initiator = p->current->is_initiator;
}

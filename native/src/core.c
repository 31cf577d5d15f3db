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

int list_once(core_work *w, handle_list *list, peer *p, uint64_t *mark) {
  if (*mark == w->call) return 0;
  *mark = w->call;
  if (reserve(&list->values, &list->capacity, list->count + 1, sizeof *list->values)) return -1;
  list->values[list->count++] = p->handle;
  return 0;
}

void begin_call(core_work *w) {
  w->call = ++w->core->call;
  w->first_sender = w->last_sender = NULL;
  wipe_groups(w);
  w->attention.count = w->authenticated.count = w->confirmed.count = 0;
}

/* Unlike `reserve`, leaves no keys behind. */
static int grow_groups(core_work *w) {
  size_t capacity = w->group_capacity ? w->group_capacity * 2 : 16;
  job_group *groups = calloc(capacity, sizeof *groups);
  if (!groups) return -1;
  copy_bytes(groups, w->groups, w->group_count * sizeof *groups);
  size_t count = w->group_count;
  wipe_groups(w);
  free(w->groups);
  w->groups = groups;
  w->group_count = count;
  w->group_capacity = capacity;
  return 0;
}

void wipe_groups(core_work *w) {
  if (w->group_count) wipe(w->groups, w->group_count * sizeof *w->groups);
  w->group_count = 0;
}

int chain_job(core_work *w, session *s, const aead_key *key, uint32_t job, uint32_t *former) {
  if (s->work_call == w->call) {
    *former = w->groups[s->work_group].last;
    w->groups[s->work_group].last = job;
    return 0;
  }
  if (w->group_count == w->group_capacity && grow_groups(w)) return -1;
  s->work_call = w->call;
  s->work_group = (uint32_t)w->group_count++;
  w->groups[s->work_group] = (job_group){.key = *key, .remote_index = s->remote_index, .first = job, .last = job};
  *former = NONE;
  return 0;
}

core *core_new(uint32_t mtu_bytes, const char *kernel_name) {
  const aead_kernel *kernel = aead_find(kernel_name);
  if (!kernel || aead_self_test(kernel)) return NULL;
  core *c = calloc(1, sizeof *c);
  if (!c) return NULL;
  if (pthread_mutex_init(&c->lock, NULL)) {
    free(c);
    return NULL;
  }
  c->kernel = kernel;
  c->mtu_bytes = mtu_bytes;
  return c;
}

core_work *core_work_new(core *c) {
  core_work *w = calloc(1, sizeof *w);
  if (w) w->core = c;
  return w;
}

void core_work_free(core_work *w) {
  if (!w) return;
  if (w->plain) wipe(w->plain, w->plain_capacity);
  wipe_groups(w);
  coalesce_free(&w->coalescer);
  free(w->attention.values), free(w->authenticated.values), free(w->confirmed.values);
  free(w->groups), free(w->jobs), free(w->sources), free(w->runs), free(w->refused);
  free(w->open_jobs), free(w->others), free(w->deliveries), free(w->heard), free(w->plain);
  free(w);
}

const char *core_kernel_name(const core *c) { return c->kernel->name; }

peer *find_peer(const core *c, int64_t handle) { return table_get(&c->peers, (uint64_t)handle); }

int core_has_peer(core *c, int64_t handle) {
  lock_core(c);
  int known = find_peer(c, handle) != NULL;
  unlock_core(c);
  return known;
}

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

static int add_peer(core *c, int64_t handle) {
  if (find_peer(c, handle)) return 0;
  peer *p = calloc(1, sizeof *p);
  if (!p) return -1;
  p->handle = handle;
  if (!table_put(&c->peers, (uint64_t)handle, p)) return 0;
  free(p);
  return -1;
}

int core_add_peer(core *c, int64_t handle) {
  lock_core(c);
  int failed = add_peer(c, handle);
  unlock_core(c);
  return failed;
}

void core_remove_peer(core *c, int64_t handle) {
  lock_core(c);
  peer *p = find_peer(c, handle);
  if (p) {
    free_sessions(c, p);
    allowed_clear(&c->allowed, &p->allowed);
    table_remove(&c->peers, (uint64_t)handle);
    free(p);
  }
  unlock_core(c);
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
  table_free(&c->peers);
  table_free(&c->sessions);
  pthread_mutex_destroy(&c->lock);
  free(c);
}

int core_set_allowed(core *c, int64_t handle, const core_prefix *prefixes, size_t count) {
  lock_core(c);
  peer *p = find_peer(c, handle);
  int failed = 0;
  if (p) allowed_clear(&c->allowed, &p->allowed);
  for (size_t i = 0; p && !failed && i < count; i++)
    failed = allowed_add(&c->allowed, &p->allowed, prefixes[i].address, prefixes[i].bytes, prefixes[i].bits);
  unlock_core(c);
  return failed;
}

int core_route(core *c, const uint8_t *address, uint32_t bytes, int64_t *handle) {
  if (bytes != 4 && bytes != 16) return 0;
  lock_core(c);
  const peer *p = (const peer *)allowed_find(&c->allowed, address, bytes);
  if (p) *handle = p->handle;
  unlock_core(c);
  return p != NULL;
}

void core_set_path(core *c, int64_t handle, const core_path *path) {
  lock_core(c);
  peer *p = find_peer(c, handle);
  if (p) p->path = *path;
  unlock_core(c);
}

void core_set_by_hand(core *c, int64_t handle, int on) {
  lock_core(c);
  peer *p = find_peer(c, handle);
  if (p) p->by_hand = on;
  unlock_core(c);
}

void core_refuse_gso(core *c, int64_t handle, const core_path *path) {
  lock_core(c);
  peer *p = find_peer(c, handle);
  if (p && p->path.family == path->family && p->path.port == path->port && !memcmp(p->path.ip, path->ip, 16))
    p->path.no_gso = 1;
  unlock_core(c);
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

static int install(core *c, session *s, int64_t handle) {
  s->owner = find_peer(c, handle);
  if (!s->owner) {
    wipe(s, sizeof *s);
    free(s);
    return 0;
  }
  s->serial = ++c->last_serial;
  place_session(c, s->owner, s); /* first, so that a reused index of a dropped session is free */
  return table_put(&c->sessions, s->local_index, s);
}

int core_install_session(core *c, int64_t handle, uint32_t local_index, uint32_t remote_index, const uint8_t send_key[32],
                         const uint8_t receive_key[32], int is_initiator, double now) {
  session *s = calloc(1, sizeof *s);
  if (!s) return -1;
  s->local_index = local_index;
  s->remote_index = remote_index;
  s->is_initiator = is_initiator;
  s->created = now;
  aead_set_key(&s->send_key, send_key);
  aead_set_key(&s->receive_key, receive_key);
  lock_core(c);
  int failed = install(c, s, handle);
  unlock_core(c);
  return failed;
}

void core_drop_sessions(core *c, int64_t handle) {
  lock_core(c);
  peer *p = find_peer(c, handle);
  if (p) {
    free_sessions(c, p);
    p->activity.rekey_wanted = 0;
    p->activity.first_unanswered_send = p->activity.first_unreplied_receive = 0;
  }
  unlock_core(c);
}

static void read_activity(const peer *p, core_activity *out) {
  *out = p->activity;
  out->has_current = p->current != NULL;
  out->has_next = p->next != NULL;
  if (!p->current) return;
  out->session_created = p->current->created;
  out->is_initiator = p->current->is_initiator;
}

void core_get_activity(core *c, int64_t handle, core_activity *out) {
  memset(out, 0, sizeof *out);
  lock_core(c);
  const peer *p = find_peer(c, handle);
  if (p) read_activity(p, out);
  unlock_core(c);
}

void core_get_drops(core *c, uint64_t drops[DROP_COUNT]) {
  lock_core(c);
  memcpy(drops, c->drops, sizeof c->drops);
  unlock_core(c);
}

/* Classifying, opening and judging what comes in. */
#include "internal.h"

enum other_kind { HANDSHAKE = 1, DISCO, STUN, GENEVE_DISCO, GENEVE_WIREGUARD };

static const uint8_t disco_magic[6] = {0x54, 0x53, 0xf0, 0x9f, 0x92, 0xac};
static const uint32_t handshake_bytes[4] = {0, 148, 92, 64};

/* Other of pump.py, or minus a drop reason: the order of tests is upstream's. */
static int classify(const uint8_t *d, uint32_t bytes) {
  if (bytes >= 20 && !(d[0] & 0xc0) && d[1] == 1 && load_be32(d + 4) == 0x2112a442) return STUN;
  if (bytes >= 8 && !(d[0] & 0xc0) && !(d[1] & 0x3f) && !d[7]) {
    if (load_be16(d + 2) == 0x7a12) return GENEVE_WIREGUARD;
    if (load_be16(d + 2) == 0x7a11 && bytes >= 14 && !memcmp(d + 8, disco_magic, 6)) return GENEVE_DISCO;
  }
  if (bytes >= 38 && !memcmp(d, disco_magic, 6)) return DISCO;
  if (bytes < TRANSPORT_OVERHEAD_BYTES) return -DROP_SHORT;
  uint32_t type = load_le32(d);
  if (type < 1 || type > 3) return -DROP_UNKNOWN_TYPE;
  return bytes == handshake_bytes[type] ? HANDSHAKE : -DROP_BAD_LENGTH;
}

static int add_other(core_work *w, const uint8_t *all, size_t at, uint32_t bytes, uint32_t source) {
  int kind = classify(all + at, bytes);
  if (kind < 0) {
    w->core->drops[-kind]++;
    return 0;
  }
  if (reserve(&w->others, &w->other_capacity, w->other_count + 1, sizeof *w->others)) return -1;
  w->others[w->other_count++] = (core_other){kind, (uint32_t)at, bytes, all + at, source};
  return 0;
}

static int add_transport(core_work *w, const uint8_t *datagram, uint8_t *plain, uint32_t bytes, uint32_t source,
                         double now) {
  session *s = table_get(&w->core->sessions, load_le32(datagram + 4));
  if (!s) {
    w->core->drops[DROP_NO_SESSION]++;
    return 0;
  }
  if (now - s->created >= REJECT_AFTER_S) {
    w->core->drops[DROP_EXPIRED]++;
    return 0;
  }
  if (reserve(&w->open_jobs, &w->open_capacity, w->open_count + 1, sizeof *w->open_jobs)) return -1;
  uint32_t at = (uint32_t)w->open_count++, former;
  w->open_jobs[at] = (open_job){.datagram = datagram, .plain = plain, .bytes = bytes, .next = NONE, .source = source,
                                .local_index = s->local_index, .serial = s->serial,
                                .plain_bytes = bytes - TRANSPORT_OVERHEAD_BYTES};
  if (chain_job(w, s, &s->receive_key, at, &former)) return -1;
  if (former != NONE) w->open_jobs[former].next = at;
  return 0;
}

static void decrypt(core_work *w) {
  aead_packet batch[KERNEL_BATCH];
  uint32_t jobs[KERNEL_BATCH];
  for (size_t group = 0; group < w->group_count; group++) {
    uint32_t at = w->groups[group].first;
    while (at != NONE) {
      size_t count = 0;
      for (; count < KERNEL_BATCH && at != NONE; count++, at = w->open_jobs[at].next) {
        const open_job *job = &w->open_jobs[at];
        jobs[count] = at;
        batch[count] = (aead_packet){.src = job->datagram + TRANSPORT_HEADER_BYTES, .dst = job->plain,
                                     .bytes = job->plain_bytes, .counter = load_le64(job->datagram + 8)};
      }
      aead_open(w->core->kernel, &w->groups[group].key, batch, count);
      for (size_t i = 0; i < count; i++) w->open_jobs[jobs[i]].ok = batch[i].ok;
    }
  }
  wipe_groups(w);
}

/* 1 when timers must be looked at. */
static int note_received(peer *p, uint32_t bytes, int is_data, double now) {
  core_activity *a = &p->activity;
  const session *current = p->current;
  int attention = a->first_unanswered_send != 0;
  a->rx_packets++;
  a->rx_bytes += bytes;
  a->last_receive = now;
  a->first_unanswered_send = 0;
  if (is_data && a->first_unreplied_receive == 0) {
    a->first_unreplied_receive = now;
    attention = 1;
  }
  if (current && current->is_initiator && now - current->created > REKEY_LAST_CHANCE_S) {
    attention |= !a->rekey_wanted;
    a->rekey_wanted = 1;
  }
  return attention;
}

/* Length of the IP packet without padding, if its source belongs to the peer; otherwise 0. */
static uint32_t check_inner(core *c, peer *p, const open_job *job) {
  const uint8_t *plain = job->plain;
  uint32_t bytes = job->plain_bytes, length = 0, address_bytes = 4;
  if (plain[0] >> 4 == 4 && bytes >= 20) {
    length = load_be16(plain + 2);
  } else if (plain[0] >> 4 == 6 && bytes >= 40) {
    length = load_be16(plain + 4) + 40u;
    address_bytes = 16;
  }
  if (length < 20 || length > bytes) {
    c->drops[DROP_MALFORMED]++;
    return 0;
  }
  if (allowed_find(&c->allowed, plain + (address_bytes == 4 ? 12 : 8), address_bytes) != &p->allowed) {
    c->drops[DROP_SOURCE]++;
    return 0;
  }
  return length;
}

static int note_heard(core_work *w, peer *p, uint32_t source) {
  if (p->authenticated_call == w->call) {
    w->heard[p->heard_at].source = source;
    return 0;
  }
  p->heard_at = (uint32_t)w->authenticated.count;
  if (reserve(&w->heard, &w->heard_capacity, w->authenticated.count + 1, sizeof *w->heard)) return -1;
  w->heard[p->heard_at] = (core_heard){p->handle, source};
  return list_once(w, &w->authenticated, p, &p->authenticated_call);
}

static int judge(core_work *w, open_job *job, double now) {
  core *c = w->core;
  if (!job->ok) {
    c->drops[DROP_AUTH]++;
    return 0;
  }
  session *s = table_get(&c->sessions, job->local_index);
  if (!s || s->serial != job->serial) { /* dropped while we decrypted */
    c->drops[DROP_NO_SESSION]++;
    return 0;
  }
  peer *p = s->owner;
  if (!replay_accept(&s->replay, load_le64(job->datagram + 8))) {
    c->drops[DROP_REPLAY]++;
    return 0;
  }
  if (note_heard(w, p, job->source)) return -1;
  if (s == p->next) { /* the handshake is confirmed; `previous` is empty while there is a `next` */
    p->previous = p->current;
    p->current = s;
    p->next = NULL;
    if (list_once(w, &w->confirmed, p, &p->confirmed_call) || list_once(w, &w->attention, p, &p->attention_call)) return -1;
  }
  if (note_received(p, job->bytes, job->plain_bytes > 0, now) && list_once(w, &w->attention, p, &p->attention_call))
    return -1;
  job->peer = p->handle;
  if (job->plain_bytes) job->inner_bytes = check_inner(c, p, job);
  return 0;
}

static int judge_all(core_work *w, double now) {
  w->call = ++w->core->call; /* the stamps of the first stretch are not ours any more */
  for (size_t i = 0; i < w->open_count; i++)
    if (judge(w, &w->open_jobs[i], now)) return -1;
  return 0;
}

static int list_deliveries(core_work *w) {
  const coalescer *from = &w->coalescer;
  if (reserve(&w->deliveries, &w->delivery_capacity, from->item_count, sizeof *w->deliveries)) return -1;
  for (uint32_t i = 0; i < from->item_count; i++)
    w->deliveries[i] = (core_delivery){.peer = from->items[i].peer, .bytes = from->items[i].bytes,
                                       .segment_bytes = coalesce_segment_bytes(&from->items[i])};
  return 0;
}

static int sort_datagrams(core_work *w, const uint8_t *datagrams, uint8_t *plain, size_t total, size_t step,
                          uint32_t source, double now) {
  for (size_t at = 0; at < total; at += step) {
    uint32_t bytes = (uint32_t)(total - at < step ? total - at : step);
    int is_transport = bytes >= TRANSPORT_OVERHEAD_BYTES && load_le32(datagrams + at) == MESSAGE_TRANSPORT;
    if (is_transport ? add_transport(w, datagrams + at, plain + at, bytes, source, now)
                     : add_other(w, datagrams, at, bytes, source))
      return -1;
  }
  return 0;
}

static int finish_open(core_work *w, double now, core_open_result *result) {
  if (coalesce_reserve(&w->coalescer, (uint32_t)w->open_count)) return -1;
  decrypt(w);
  lock_core(w->core);
  int failed = judge_all(w, now);
  unlock_core(w->core);
  if (failed) return -1;
  for (size_t i = 0; i < w->open_count; i++) {
    const open_job *job = &w->open_jobs[i];
    if (job->inner_bytes) coalesce_add(&w->coalescer, job->peer, job->plain, job->inner_bytes);
  }
  if (list_deliveries(w)) return -1;
  *result = (core_open_result){.deliveries = w->deliveries,
                               .delivery_count = w->coalescer.item_count,
                               .others = w->others,
                               .other_count = w->other_count,
                               .authenticated = w->authenticated.values,
                               .authenticated_count = w->authenticated.count,
                               .heard = w->heard,
                               .confirmed = w->confirmed.values,
                               .confirmed_count = w->confirmed.count,
                               .attention = w->attention.values,
                               .attention_count = w->attention.count};
  return 0;
}

/* `plain` NULL: in place. */
static int sort_buffers(core_work *w, const core_buffer *buffers, size_t count, uint8_t *plain, double now) {
  begin_call(w);
  w->open_count = w->other_count = 0;
  coalesce_reset(&w->coalescer);
  for (size_t i = 0; i < count; i++) {
    const core_buffer *b = &buffers[i];
    uint8_t *out = plain ? plain : b->datagrams + TRANSPORT_HEADER_BYTES;
    if (sort_datagrams(w, b->datagrams, out, b->bytes, b->datagram_bytes ? b->datagram_bytes : b->bytes, b->source, now))
      return -1;
  }
  return 0;
}

int core_open_buffers(core_work *w, const core_buffer *buffers, size_t count, double now, core_open_result *result) {
  lock_core(w->core);
  int failed = sort_buffers(w, buffers, count, NULL, now);
  unlock_core(w->core);
  return failed ? -1 : finish_open(w, now, result);
}

int core_run_open(core_work *w, const uint8_t *datagrams, size_t total, size_t datagram_bytes, double now,
                  core_open_result *result) {
  core_buffer whole = {.bytes = total, .datagram_bytes = datagram_bytes};
  memcpy(&whole.datagrams, &datagrams, sizeof datagrams); /* not written to: there is `plain` */
  if (reserve(&w->plain, &w->plain_capacity, total, 1)) return -1;
  lock_core(w->core);
  int failed = sort_buffers(w, &whole, 1, w->plain, now);
  unlock_core(w->core);
  return failed ? -1 : finish_open(w, now, result);
}

void core_coalesce_udp(core_work *w, int wanted) { w->coalescer.takes_udp = (uint8_t)wanted; }

void core_write_opened(core_work *w) {
  for (uint32_t i = 0; i < w->coalescer.item_count; i++)
    coalesce_write(&w->coalescer, &w->coalescer.items[i], w->deliveries[i].out);
}

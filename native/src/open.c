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

static int add_other(core *c, const uint8_t *all, size_t at, uint32_t bytes) {
  int kind = classify(all + at, bytes);
  if (kind < 0) {
    c->drops[-kind]++;
    return 0;
  }
  if (reserve(&c->others, &c->other_capacity, c->other_count + 1, sizeof *c->others)) return -1;
  c->others[c->other_count++] = (core_other){kind, (uint32_t)at, bytes};
  return 0;
}

static int add_transport(core *c, const uint8_t *datagram, uint8_t *plain, uint32_t bytes, double now) {
  session *s = table_get(&c->sessions, load_le32(datagram + 4));
  if (!s) {
    c->drops[DROP_NO_SESSION]++;
    return 0;
  }
  if (now - s->created >= REJECT_AFTER_S) {
    c->drops[DROP_EXPIRED]++;
    return 0;
  }
  if (reserve(&c->open_jobs, &c->open_capacity, c->open_count + 1, sizeof *c->open_jobs)) return -1;
  uint32_t at = (uint32_t)c->open_count++, former = chain_job(c, s, at);
  c->open_jobs[at] = (open_job){.datagram = datagram, .plain = plain, .bytes = bytes, .session = s, .next = NONE,
                                .plain_bytes = bytes - TRANSPORT_OVERHEAD_BYTES};
  if (former != NONE) c->open_jobs[former].next = at;
  return 0;
}

static void decrypt(core *c) {
  aead_packet batch[KERNEL_BATCH];
  uint32_t jobs[KERNEL_BATCH];
  for (session *s = c->touched; s; s = s->next_touched) {
    uint32_t at = s->work_first;
    while (at != NONE) {
      size_t count = 0;
      for (; count < KERNEL_BATCH && at != NONE; count++, at = c->open_jobs[at].next) {
        const open_job *job = &c->open_jobs[at];
        jobs[count] = at;
        batch[count] = (aead_packet){.src = job->datagram + TRANSPORT_HEADER_BYTES, .dst = job->plain,
                                     .bytes = job->plain_bytes, .counter = load_le64(job->datagram + 8)};
      }
      aead_open(c->kernel, &s->receive_key, batch, count);
      for (size_t i = 0; i < count; i++) c->open_jobs[jobs[i]].ok = batch[i].ok;
    }
  }
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

/* The IP packet without padding goes to the coalescer, if its source belongs to the peer. */
static void take_inner(core *c, peer *p, const open_job *job) {
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
    return;
  }
  if (allowed_find(&c->allowed, plain + (address_bytes == 4 ? 12 : 8), address_bytes) != &p->allowed) {
    c->drops[DROP_SOURCE]++;
    return;
  }
  coalesce_add(&c->coalescer, p->handle, plain, length);
}

static int judge(core *c, const open_job *job, double now) {
  session *s = job->session;
  peer *p = s->owner;
  if (!job->ok) {
    c->drops[DROP_AUTH]++;
    return 0;
  }
  if (!replay_accept(&s->replay, load_le64(job->datagram + 8))) {
    c->drops[DROP_REPLAY]++;
    return 0;
  }
  if (list_once(c, &c->authenticated, p, &p->authenticated_call)) return -1;
  if (s == p->next) { /* the handshake is confirmed; `previous` is empty while there is a `next` */
    p->previous = p->current;
    p->current = s;
    p->next = NULL;
    if (list_once(c, &c->confirmed, p, &p->confirmed_call) || list_once(c, &c->attention, p, &p->attention_call)) return -1;
  }
  if (note_received(p, job->bytes, job->plain_bytes > 0, now) && list_once(c, &c->attention, p, &p->attention_call))
    return -1;
  if (job->plain_bytes) take_inner(c, p, job);
  return 0;
}

static int list_deliveries(core *c) {
  const coalescer *from = &c->coalescer;
  if (reserve(&c->deliveries, &c->delivery_capacity, from->item_count, sizeof *c->deliveries)) return -1;
  for (uint32_t i = 0; i < from->item_count; i++)
    c->deliveries[i] = (core_delivery){.peer = from->items[i].peer, .bytes = from->items[i].bytes,
                                       .segment_bytes = coalesce_segment_bytes(&from->items[i])};
  return 0;
}

static int sort_datagrams(core *c, const uint8_t *datagrams, size_t total, size_t step, double now) {
  for (size_t at = 0; at < total; at += step) {
    uint32_t bytes = (uint32_t)(total - at < step ? total - at : step);
    int is_transport = bytes >= TRANSPORT_OVERHEAD_BYTES && load_le32(datagrams + at) == MESSAGE_TRANSPORT;
    if (is_transport ? add_transport(c, datagrams + at, c->plain + at, bytes, now) : add_other(c, datagrams, at, bytes))
      return -1;
  }
  return 0;
}

int core_run_open(core *c, const uint8_t *datagrams, size_t total, size_t datagram_bytes, double now,
                  core_open_result *result) {
  begin_call(c);
  c->open_count = c->other_count = 0;
  coalesce_reset(&c->coalescer);
  if (reserve(&c->plain, &c->plain_capacity, total, 1)) return -1;
  if (sort_datagrams(c, datagrams, total, datagram_bytes ? datagram_bytes : total, now)) return -1;
  if (coalesce_reserve(&c->coalescer, (uint32_t)c->open_count)) return -1;
  decrypt(c);
  for (size_t i = 0; i < c->open_count; i++)
    if (judge(c, &c->open_jobs[i], now)) return -1;
  if (list_deliveries(c)) return -1;
  *result = (core_open_result){.deliveries = c->deliveries,
                               .delivery_count = c->coalescer.item_count,
                               .others = c->others,
                               .other_count = c->other_count,
                               .authenticated = c->authenticated.values,
                               .authenticated_count = c->authenticated.count,
                               .confirmed = c->confirmed.values,
                               .confirmed_count = c->confirmed.count,
                               .attention = c->attention.values,
                               .attention_count = c->attention.count};
  return 0;
}

void core_write_opened(core *c) {
  for (uint32_t i = 0; i < c->coalescer.item_count; i++)
    coalesce_write(&c->coalescer, &c->coalescer.items[i], c->deliveries[i].out);
}

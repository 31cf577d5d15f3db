/* Routing, cutting and sealing of what goes out. */
#include "internal.h"

#define COUNTER_LIMIT (REJECT_AFTER_MESSAGES - 65536) /* one super-segment cannot overrun */

static session *usable_session(const peer *p, double now) {
  session *s = p->current;
  return s && now - s->created < REJECT_AFTER_S && s->send_counter < COUNTER_LIMIT ? s : NULL;
}

/* A super-segment may be longer than a run: what counts are its pieces. */
static int is_cut_small(const core_frame *frame) {
  return frame->segment_bytes > 0 && frame->segment_bytes <= PACKET_MOST_BYTES - SEGMENT_MOST_HEADER_BYTES;
}

static peer *owner_of(core *c, const core_frame *frame, int *no_peer) {
  const uint8_t *packet = frame->packet;
  int version = frame->bytes ? packet[0] >> 4 : 0;
  peer *p;
  if (version == 4 && frame->bytes >= 20) {
    p = (peer *)allowed_find(&c->allowed, packet + 16, 4);
  } else if (version == 6 && frame->bytes >= 40) {
    p = (peer *)allowed_find(&c->allowed, packet + 24, 16);
  } else {
    c->drops[DROP_MALFORMED]++;
    return NULL;
  }
  *no_peer = !p;
  if (p && frame->bytes > PACKET_MOST_BYTES && !is_cut_small(frame)) {
    c->drops[DROP_TOO_BIG]++;
    return NULL;
  }
  return p;
}

/* Zeros up to a multiple of 16, never beyond the MTU; a larger packet is padded as its last MTU-sized part would be. */
static uint32_t padded(const core *c, uint32_t bytes) {
  if (!(bytes & 15)) return bytes;
  uint32_t last = bytes <= c->mtu_bytes ? bytes : bytes % c->mtu_bytes, up = (last + 15) & ~15u;
  return bytes + (up < c->mtu_bytes ? up : c->mtu_bytes) - last;
}

static void note_sender(core_work *w, peer *p) {
  if (p->send_call == w->call) return;
  p->send_call = w->call;
  p->open_run = NONE;
  p->sent_datagrams = p->sent_bytes = 0;
  p->next_sender = NULL;
  if (w->last_sender) w->last_sender->next_sender = p;
  else w->first_sender = p;
  w->last_sender = p;
}

/* The run that takes a datagram of this size: each peer has one open run, a smaller datagram closes it. */
static int place_in_run(core_work *w, peer *p, uint32_t bytes, seal_job *job) {
  core_run *run = p->open_run == NONE ? NULL : &w->runs[p->open_run];
  if (run && (bytes > run->datagram_bytes || run->bytes + bytes > RUN_MOST_BYTES || run->count >= RUN_MOST_DATAGRAMS))
    run = NULL;
  if (!run) {
    if (reserve(&w->runs, &w->run_capacity, w->run_count + 1, sizeof *w->runs)) return -1;
    p->open_run = (uint32_t)w->run_count++;
    run = &w->runs[p->open_run];
    *run = (core_run){.peer = p->handle, .datagram_bytes = bytes, .path = p->path};
  }
  job->run = p->open_run;
  job->run_at = run->bytes;
  run->bytes += bytes;
  run->count++;
  if (bytes < run->datagram_bytes) p->open_run = NONE;
  return 0;
}

static int add_job(core_work *w, peer *p, session *s, seal_job job) {
  if (reserve(&w->jobs, &w->job_capacity, w->job_count + 1, sizeof *w->jobs)) return -1;
  job.padded_bytes = padded(w->core, job.plain_bytes);
  uint32_t bytes = job.padded_bytes + TRANSPORT_OVERHEAD_BYTES, at = (uint32_t)w->job_count;
  note_sender(w, p);
  if (place_in_run(w, p, bytes, &job)) return -1;
  p->sent_datagrams++;
  p->sent_bytes += bytes;
  job.counter = s->send_counter++;
  job.next = NONE;
  w->jobs[w->job_count++] = job;
  uint32_t former;
  if (chain_job(w, s, &s->send_key, at, &former)) return -1;
  if (former != NONE) w->jobs[former].next = at;
  return 0;
}

static int add_super_segment(core_work *w, peer *p, session *s, const core_frame *frame) {
  if (reserve(&w->sources, &w->source_capacity, w->source_count + 1, sizeof *w->sources)) return -1;
  segment_source *source = &w->sources[w->source_count];
  if (frame->segment_bytes < 0 ||
      segment_parse(source, frame->packet, (uint32_t)frame->bytes, (uint32_t)frame->segment_bytes, frame->is_udp)) {
    w->core->drops[DROP_MALFORMED]++;
    return 0;
  }
  uint32_t header = source->header_bytes, payload = 0;
  for (uint32_t i = 0; i < source->count; i++) {
    segment_payload(source, i, &payload);
    seal_job job = {.plain_bytes = header + payload, .source = (uint32_t)w->source_count, .piece = i};
    if (add_job(w, p, s, job)) return -1;
  }
  w->source_count++;
  return 0;
}

static int refuse(core_work *w, const peer *p, uint32_t frame) {
  if (reserve(&w->refused, &w->refused_capacity, w->refused_count + 1, sizeof *w->refused)) return -1;
  w->refused[w->refused_count++] = (core_refused){p ? p->handle : 0, frame, !p};
  return 0;
}

/* 1 when timers must be looked at. */
static int note_sent(peer *p, uint32_t datagrams, uint32_t bytes, int is_data, double now) {
  core_activity *a = &p->activity;
  const session *s = p->current;
  int attention = a->first_unreplied_receive != 0;
  a->tx_packets += datagrams;
  a->tx_bytes += bytes;
  a->last_send = now;
  a->first_unreplied_receive = 0;
  if (is_data && a->first_unanswered_send == 0) {
    a->first_unanswered_send = now;
    attention = 1;
  }
  int is_old = s->is_initiator && now - s->created > REKEY_AFTER_S;
  if (!a->rekey_wanted && (is_old || s->send_counter > REKEY_AFTER_MESSAGES)) a->rekey_wanted = attention = 1;
  return attention;
}

static void begin_seal(core_work *w) {
  begin_call(w);
  w->job_count = w->source_count = w->run_count = w->refused_count = 0;
}

static void report(const core_work *w, core_seal_result *result) {
  *result = (core_seal_result){.runs = w->runs,
                               .run_count = w->run_count,
                               .refused = w->refused,
                               .refused_count = w->refused_count,
                               .attention = w->attention.values,
                               .attention_count = w->attention.count};
}

static int plan_frame(core_work *w, const core_frame *frame, uint32_t number, double now, int keep_unrouted) {
  int no_peer = 0;
  peer *p = owner_of(w->core, frame, &no_peer);
  if (keep_unrouted && (no_peer || (p && p->by_hand))) return refuse(w, NULL, number);
  if (no_peer) w->core->drops[DROP_NO_PEER]++;
  if (!p) return 0;
  session *s = usable_session(p, now);
  if (!s) return refuse(w, p, number);
  if (frame->segment_bytes) return add_super_segment(w, p, s, frame);
  seal_job job = {.plain = frame->packet, .plain_bytes = (uint32_t)frame->bytes, .source = NONE};
  return add_job(w, p, s, job);
}

static int plan(core_work *w, const core_frame *frames, size_t count, double now, int keep_unrouted) {
  begin_seal(w);
  for (size_t i = 0; i < count; i++)
    if (plan_frame(w, &frames[i], (uint32_t)i, now, keep_unrouted)) return -1;
  for (peer *p = w->first_sender; p; p = p->next_sender)
    if (note_sent(p, p->sent_datagrams, p->sent_bytes, 1, now) && list_once(w, &w->attention, p, &p->attention_call))
      return -1;
  return 0;
}

int core_plan_seal(core_work *w, const core_frame *frames, size_t count, double now, int keep_unrouted,
                   core_seal_result *result) {
  lock_core(w->core);
  int failed = plan(w, frames, count, now, keep_unrouted);
  unlock_core(w->core);
  report(w, result);
  return failed;
}

static int plan_to(core_work *w, int64_t handle, const core_frame *packets, size_t count, double now) {
  begin_seal(w);
  peer *p = find_peer(w->core, handle);
  session *s = p ? usable_session(p, now) : NULL;
  for (size_t i = 0; s && i < count; i++) {
    if (packets[i].bytes > PACKET_MOST_BYTES) {
      w->core->drops[DROP_TOO_BIG]++;
      continue;
    }
    seal_job job = {.plain = packets[i].packet, .plain_bytes = (uint32_t)packets[i].bytes, .source = NONE};
    if (add_job(w, p, s, job)) return -1;
    note_sent(p, 1, w->jobs[w->job_count - 1].padded_bytes + TRANSPORT_OVERHEAD_BYTES, packets[i].bytes > 0, now);
  }
  return 0;
}

int core_plan_seal_to(core_work *w, int64_t handle, const core_frame *packets, size_t count, double now,
                      core_seal_result *result) {
  lock_core(w->core);
  int failed = plan_to(w, handle, packets, count, now);
  unlock_core(w->core);
  report(w, result);
  return failed;
}

static aead_packet prepare(const core_work *w, uint32_t remote_index, const seal_job *job, uint8_t *header) {
  uint8_t *out = w->runs[job->run].out + job->run_at;
  store_le32(out, MESSAGE_TRANSPORT);
  store_le32(out + 4, remote_index);
  store_le64(out + 8, job->counter);
  aead_packet packet = {.dst = out + TRANSPORT_HEADER_BYTES, .bytes = job->padded_bytes, .counter = job->counter};
  if (job->source == NONE) {
    packet.src = job->plain;
    packet.src_bytes = job->plain_bytes;
  } else {
    const segment_source *source = &w->sources[job->source];
    segment_header(source, job->piece, header);
    packet.head = header;
    packet.head_bytes = source->header_bytes;
    packet.src = segment_payload(source, job->piece, &packet.src_bytes);
  }
  return packet;
}

void core_run_seal(core_work *w) {
  aead_packet batch[KERNEL_BATCH];
  uint8_t headers[KERNEL_BATCH][SEGMENT_MOST_HEADER_BYTES];
  for (size_t group = 0; group < w->group_count; group++) {
    const job_group *g = &w->groups[group];
    uint32_t at = g->first;
    while (at != NONE) {
      size_t count = 0;
      for (; count < KERNEL_BATCH && at != NONE; count++, at = w->jobs[at].next)
        batch[count] = prepare(w, g->remote_index, &w->jobs[at], headers[count]);
      aead_seal(w->core->kernel, &g->key, batch, count);
    }
  }
  wipe_groups(w);
  wipe(headers, sizeof headers);
}

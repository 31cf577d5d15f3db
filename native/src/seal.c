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

static peer *owner_of(core *c, const core_frame *frame) {
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
  if (!p) {
    c->drops[DROP_NO_PEER]++;
  } else if (frame->bytes > PACKET_MOST_BYTES && !is_cut_small(frame)) {
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

static void note_sender(core *c, peer *p) {
  if (p->send_call == c->call) return;
  p->send_call = c->call;
  p->open_run = NONE;
  p->sent_datagrams = p->sent_bytes = 0;
  p->next_sender = NULL;
  if (c->last_sender) c->last_sender->next_sender = p;
  else c->first_sender = p;
  c->last_sender = p;
}

/* The run that takes a datagram of this size: each peer has one open run, a smaller datagram closes it. */
static int place_in_run(core *c, peer *p, uint32_t bytes, seal_job *job) {
  core_run *run = p->open_run == NONE ? NULL : &c->runs[p->open_run];
  if (run && (bytes > run->datagram_bytes || run->bytes + bytes > RUN_MOST_BYTES || run->count >= RUN_MOST_DATAGRAMS))
    run = NULL;
  if (!run) {
    if (reserve(&c->runs, &c->run_capacity, c->run_count + 1, sizeof *c->runs)) return -1;
    p->open_run = (uint32_t)c->run_count++;
    run = &c->runs[p->open_run];
    *run = (core_run){.peer = p->handle, .datagram_bytes = bytes};
  }
  job->run = p->open_run;
  job->run_at = run->bytes;
  run->bytes += bytes;
  run->count++;
  if (bytes < run->datagram_bytes) p->open_run = NONE;
  return 0;
}

static int add_job(core *c, peer *p, session *s, seal_job job) {
  if (reserve(&c->jobs, &c->job_capacity, c->job_count + 1, sizeof *c->jobs)) return -1;
  job.padded_bytes = padded(c, job.plain_bytes);
  uint32_t bytes = job.padded_bytes + TRANSPORT_OVERHEAD_BYTES, at = (uint32_t)c->job_count;
  note_sender(c, p);
  if (place_in_run(c, p, bytes, &job)) return -1;
  p->sent_datagrams++;
  p->sent_bytes += bytes;
  job.counter = s->send_counter++;
  job.next = NONE;
  c->jobs[c->job_count++] = job;
  uint32_t former = chain_job(c, s, at);
  if (former != NONE) c->jobs[former].next = at;
  return 0;
}

static int add_super_segment(core *c, peer *p, session *s, const core_frame *frame) {
  if (reserve(&c->sources, &c->source_capacity, c->source_count + 1, sizeof *c->sources)) return -1;
  segment_source *source = &c->sources[c->source_count];
  if (frame->segment_bytes < 0 ||
      segment_parse(source, frame->packet, (uint32_t)frame->bytes, (uint32_t)frame->segment_bytes)) {
    c->drops[DROP_MALFORMED]++;
    return 0;
  }
  uint32_t header = source->header_bytes, payload = 0;
  for (uint32_t i = 0; i < source->count; i++) {
    segment_payload(source, i, &payload);
    seal_job job = {.plain_bytes = header + payload, .source = (uint32_t)c->source_count, .piece = i};
    if (add_job(c, p, s, job)) return -1;
  }
  c->source_count++;
  return 0;
}

static int refuse(core *c, peer *p, uint32_t frame) {
  if (reserve(&c->refused, &c->refused_capacity, c->refused_count + 1, sizeof *c->refused)) return -1;
  c->refused[c->refused_count++] = (core_refused){p->handle, frame};
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

static void begin_seal(core *c) {
  begin_call(c);
  c->job_count = c->source_count = c->run_count = c->refused_count = 0;
}

static void report(const core *c, core_seal_result *result) {
  *result = (core_seal_result){.runs = c->runs,
                               .run_count = c->run_count,
                               .refused = c->refused,
                               .refused_count = c->refused_count,
                               .attention = c->attention.values,
                               .attention_count = c->attention.count};
}

int core_plan_seal(core *c, const core_frame *frames, size_t count, double now, core_seal_result *result) {
  begin_seal(c);
  for (size_t i = 0; i < count; i++) {
    peer *p = owner_of(c, &frames[i]);
    if (!p) continue;
    session *s = usable_session(p, now);
    seal_job job = {.plain = frames[i].packet, .plain_bytes = (uint32_t)frames[i].bytes, .source = NONE};
    int failed = !s                         ? refuse(c, p, (uint32_t)i)
                 : frames[i].segment_bytes ? add_super_segment(c, p, s, &frames[i])
                                            : add_job(c, p, s, job);
    if (failed) return -1;
  }
  for (peer *p = c->first_sender; p; p = p->next_sender)
    if (note_sent(p, p->sent_datagrams, p->sent_bytes, 1, now) && list_once(c, &c->attention, p, &p->attention_call))
      return -1;
  report(c, result);
  return 0;
}

int core_plan_seal_to(core *c, int64_t handle, const core_frame *packets, size_t count, double now,
                      core_seal_result *result) {
  begin_seal(c);
  peer *p = find_peer(c, handle);
  session *s = p ? usable_session(p, now) : NULL;
  for (size_t i = 0; s && i < count; i++) {
    if (packets[i].bytes > PACKET_MOST_BYTES) {
      c->drops[DROP_TOO_BIG]++;
      continue;
    }
    seal_job job = {.plain = packets[i].packet, .plain_bytes = (uint32_t)packets[i].bytes, .source = NONE};
    if (add_job(c, p, s, job)) return -1;
    note_sent(p, 1, c->jobs[c->job_count - 1].padded_bytes + TRANSPORT_OVERHEAD_BYTES, packets[i].bytes > 0, now);
  }
  report(c, result);
  return 0;
}

static aead_packet prepare(const core *c, const session *s, const seal_job *job, uint8_t *header) {
  uint8_t *out = c->runs[job->run].out + job->run_at;
  store_le32(out, MESSAGE_TRANSPORT);
  store_le32(out + 4, s->remote_index);
  store_le64(out + 8, job->counter);
  aead_packet packet = {.dst = out + TRANSPORT_HEADER_BYTES, .bytes = job->padded_bytes, .counter = job->counter};
  if (job->source == NONE) {
    packet.src = job->plain;
    packet.src_bytes = job->plain_bytes;
  } else {
    const segment_source *source = &c->sources[job->source];
    segment_header(source, job->piece, header);
    packet.head = header;
    packet.head_bytes = source->header_bytes;
    packet.src = segment_payload(source, job->piece, &packet.src_bytes);
  }
  return packet;
}

void core_run_seal(core *c) {
  aead_packet batch[KERNEL_BATCH];
  uint8_t headers[KERNEL_BATCH][SEGMENT_MOST_HEADER_BYTES];
  for (session *s = c->touched; s; s = s->next_touched) {
    uint32_t at = s->work_first;
    while (at != NONE) {
      size_t count = 0;
      for (; count < KERNEL_BATCH && at != NONE; count++, at = c->jobs[at].next)
        batch[count] = prepare(c, s, &c->jobs[at], headers[count]);
      aead_seal(c->kernel, &s->send_key, batch, count);
    }
  }
  wipe(headers, sizeof headers);
}

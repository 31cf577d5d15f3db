/* From the TUN to the underlay: read what there is, filter, plan, seal, send. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "fdinternal.h"

struct tx_worker {
  fdpump *pump;
  core_work *work;
  uint8_t *in, *out;
  size_t out_capacity;
  core_frame frames[TX_MOST_FRAMES];
};

tx_worker *tx_new(fdpump *p) {
  tx_worker *t = calloc(1, sizeof *t);
  if (!t) return NULL;
  t->pump = p;
  t->in = malloc(TX_BUFFER_BYTES);
  t->work = core_work_new(p->core);
  if (t->in && t->work) return t;
  tx_free(t);
  return NULL;
}

void tx_free(tx_worker *t) {
  if (!t) return;
  if (t->in) wipe(t->in, TX_BUFFER_BYTES);
  free(t->in);
  free(t->out);
  core_work_free(t->work);
  free(t);
}

/* A frame goes up; a UDP super-segment in pieces, because Python does not know those. */
static void up_frame(fdpump *p, enum up_kind kind, int64_t peer, const core_frame *frame) {
  union {
    const uint8_t *from;
    void *base;
  } data = {frame->packet};
  struct iovec parts[2] = {{data.base, frame->bytes}, {NULL, 0}};
  if (!frame->is_udp) {
    up_bytes(p, kind, peer, frame->segment_bytes > 0 ? (uint32_t)frame->segment_bytes : 0, parts, 1);
    return;
  }
  segment_source source;
  uint8_t header[SEGMENT_MOST_HEADER_BYTES];
  if (segment_parse(&source, frame->packet, (uint32_t)frame->bytes, (uint32_t)frame->segment_bytes, 1)) return;
  for (uint32_t i = 0; i < source.count; i++) {
    uint32_t payload_bytes;
    data.from = segment_payload(&source, i, &payload_bytes);
    segment_header(&source, i, header);
    parts[0] = (struct iovec){header, source.header_bytes};
    parts[1] = (struct iovec){data.base, payload_bytes};
    up_bytes(p, kind, peer, 0, parts, 2);
  }
}

/* Reads until the TUN is empty or a batch is full. Frames to be sealed, or -1 when the TUN is gone. `any`: something came. */
static int read_frames(tx_worker *t, int *any) {
  fdpump *p = t->pump;
  size_t used = 0, batch_bytes = 0;
  int frames = 0;
  uint64_t reads = 0;
  while (frames < TX_MOST_FRAMES && batch_bytes < TX_FULL_BYTES && used + FRAME_MOST_BYTES + VNET_BYTES <= TX_BUFFER_BYTES) {
    ssize_t got = read(p->options.tun_fd, t->in + used, FRAME_MOST_BYTES + VNET_BYTES);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (got <= 0) {
      if (frames) break; /* it will say so again */
      if (got == 0) errno = ENODEV;
      return -1;
    }
    reads++;
    count(p, FD_TUN_READ_BYTES, (uint64_t)got);
    core_frame *frame = &t->frames[frames];
    if (tun_parse(p, t->in + used, (uint32_t)got, frame)) {
      count(p, FD_TUN_MALFORMED, 1);
    } else if (filter_outbound(&p->filter, frame->packet, (uint32_t)frame->bytes) == FILTER_PASS) {
      frames++;
      batch_bytes += frame->bytes;
      used += ((size_t)got + 63) & ~(size_t)63;
    } else {
      up_frame(p, UP_HOST, 0, frame);
    }
  }
  if (reads) count(p, FD_TUN_READS, reads);
  *any = reads > 0;
  return frames;
}

static int place_runs(tx_worker *t, core_seal_result *result) {
  size_t bytes = 0;
  for (size_t i = 0; i < result->run_count; i++) bytes += result->runs[i].bytes;
  if (reserve(&t->out, &t->out_capacity, bytes, 1)) return -1;
  uint8_t *at = t->out;
  for (size_t i = 0; i < result->run_count; i++) {
    result->runs[i].out = at;
    at += result->runs[i].bytes;
  }
  return 0;
}

int tx_once(tx_worker *t) {
  fdpump *p = t->pump;
  core_seal_result result;
  int any = 0, frames = read_frames(t, &any);
  if (frames <= 0) return frames < 0 ? -1 : any;
  double now = fd_now();
  count(p, FD_TUN_FRAMES, (uint64_t)frames);
  if (core_plan_seal(t->work, t->frames, (size_t)frames, now, 1, &result) || place_runs(t, &result)) {
    wipe_groups(t->work); /* the keys: `core_run_seal` is not reached */
    return frames;
  }
  for (size_t i = 0; i < result.refused_count; i++) {
    const core_refused *r = &result.refused[i];
    up_frame(p, r->no_peer ? UP_HOST : UP_STAGE, r->peer, &t->frames[r->frame]);
  }
  core_run_seal(t->work);
  udp_send_runs(p, result.runs, result.run_count);
  up_attention(p, result.attention, result.attention_count, now);
  return frames;
}

/* From the underlay to the TUN: receive, open, filter, write. */
#include <stdlib.h>

#include "fdinternal.h"
#include "mss.h"

struct rx_worker {
  fdpump *pump;
  core_work *work;
  uint8_t *buffers[RX_BUFFERS];
  udp_arrival arrivals[RX_BUFFERS];
  uint8_t *verdicts;
  size_t verdict_capacity;
};

rx_worker *rx_new(fdpump *p) {
  rx_worker *x = calloc(1, sizeof *x);
  if (!x) return NULL;
  x->pump = p;
  x->work = core_work_new(p->core);
  int failed = !x->work;
  for (int i = 0; i < RX_BUFFERS; i++) failed |= !(x->buffers[i] = malloc(FRAME_MOST_BYTES));
  if (!failed) return x;
  rx_free(x);
  return NULL;
}

void rx_free(rx_worker *x) {
  if (!x) return;
  for (int i = 0; i < RX_BUFFERS; i++) {
    if (x->buffers[i]) wipe(x->buffers[i], FRAME_MOST_BYTES);
    free(x->buffers[i]);
  }
  free(x->verdicts);
  core_work_free(x->work);
  free(x);
}

/* A UDP item in its packets, because Python does not know such super-segments. */
static void up_singly(fdpump *p, const coalescer *c, const coalesce_item *item) {
  union {
    const uint8_t *from;
    void *base;
  } data = {item->packet};
  struct iovec part = {data.base, item->first_bytes};
  up_bytes(p, UP_INBOUND, item->peer, 0, &part, 1);
  for (uint32_t i = item->first_piece; i; i = c->pieces[i].next) {
    data.from = c->pieces[i].data - item->header_bytes;
    part = (struct iovec){data.base, c->pieces[i].bytes + item->header_bytes};
    up_bytes(p, UP_INBOUND, item->peer, 0, &part, 1);
  }
}

static void up_item(fdpump *p, const coalescer *c, const coalesce_item *item) {
  if (!item->first_piece || item->is_udp) {
    up_singly(p, c, item);
    return;
  }
  uint8_t *whole = malloc(item->bytes);
  if (!whole) return;
  coalesce_write(c, item, whole);
  struct iovec part = {whole, item->bytes};
  up_bytes(p, UP_INBOUND, item->peer, item->segment_bytes, &part, 1);
  free(whole);
}

static void lower_mss(fdpump *p, const coalescer *c) {
  for (uint32_t i = 0; i < c->item_count; i++) {
    union {
      const uint8_t *from;
      uint8_t *at;
    } packet = {c->items[i].packet};
    if (!c->items[i].first_piece && mss_clamp(packet.at, c->items[i].first_bytes, p->core->mtu_bytes))
      count(p, FD_MSS_LOWERED, 1);
  }
}

static void deliver(rx_worker *x) {
  fdpump *p = x->pump;
  coalescer *c = &x->work->coalescer;
  uint64_t passed = 0;
  if (!c->item_count || reserve(&x->verdicts, &x->verdict_capacity, c->item_count, 1)) return;
  lower_mss(p, c);
  filter_begin(&p->filter);
  for (uint32_t i = 0; i < c->item_count; i++)
    x->verdicts[i] = (uint8_t)filter_inbound(&p->filter, c->items[i].peer, c->items[i].packet, c->items[i].first_bytes);
  filter_end(&p->filter);
  for (uint32_t i = 0; i < c->item_count; i++) {
    if (x->verdicts[i] == FILTER_PASS) {
      tun_write_item(p, c, &c->items[i]);
      passed++;
    } else {
      up_item(p, c, &c->items[i]);
    }
  }
  count(p, FD_FILTER_PASSED, passed);
  count(p, FD_FILTER_ASKED, c->item_count - passed);
}

static void tell(rx_worker *x, const core_open_result *result, double now) {
  fdpump *p = x->pump;
  for (size_t i = 0; i < result->other_count; i++) {
    const core_other *o = &result->others[i];
    up_from(p, UP_OTHER, 0, (uint32_t)o->kind, &x->arrivals[o->source].source, o->datagram, o->bytes);
  }
  for (size_t i = 0; i < result->confirmed_count; i++) up_simple(p, UP_CONFIRMED, result->confirmed[i], 0);
  for (size_t i = 0; i < result->authenticated_count; i++)
    up_heard(p, result->heard[i].peer, &x->arrivals[result->heard[i].source].source, now);
  up_attention(p, result->attention, result->attention_count, now);
}

static int receive(rx_worker *x, int family) {
  core_buffer buffers[RX_BUFFERS];
  core_open_result result;
  int got = udp_receive(x->pump, family, x->buffers, x->arrivals);
  if (!got) return 0;
  double now = fd_now();
  for (int i = 0; i < got; i++)
    buffers[i] = (core_buffer){x->arrivals[i].at, x->arrivals[i].bytes, x->arrivals[i].unit, (uint32_t)i};
  core_coalesce_udp(x->work, atomic_load_explicit(&x->pump->tun_udp_gso, memory_order_relaxed));
  if (core_open_buffers(x->work, buffers, (size_t)got, now, &result)) return got;
  deliver(x);
  tell(x, &result, now);
  return got;
}

int rx_once(rx_worker *x) {
  int got = 0;
  for (int family = 0; family < 2; family++)
    if (x->pump->options.udp_fd[family] >= 0) got += receive(x, family);
  return got;
}

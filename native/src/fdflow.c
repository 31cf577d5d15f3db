/* The filter's fast half: what can be said without rules (tailscale: `wgengine/filter/filter.go`), flows that we started,
 * and what a verdict from above allowed. Anything else is asked for, so that this table may forget without harm.
 * Stateless for TCP: only a SYN needs a rule. */
#include <stdlib.h>

#include "fdinternal.h"

enum { ICMP = 1, TCP = 6, UDP = 17, V6_FRAGMENT = 44, ICMP6 = 58, TSMP = 99, SCTP = 132 };
#define TCP_SYN 0x02
#define TCP_ACK 0x10
#define FRAGMENT_LEAST_UNITS 10 /* a later fragment must not start inside a transport header */

typedef struct {
  const uint8_t *source, *destination, *transport;
  uint32_t address_bytes, transport_bytes;
  uint8_t protocol, is_later_fragment;
} packet_view;

static int view_v4(packet_view *v, const uint8_t *p, uint32_t bytes) {
  uint32_t header = (p[0] & 15) * 4u, length = load_be16(p + 2), fragment = load_be16(p + 6) & 0x3fff;
  if (header < 20 || header > bytes || length < header || length > bytes) return -1;
  *v = (packet_view){p + 12, p + 16, p + header, 4, bytes - header, p[9], (fragment & 0x1fff) != 0};
  if (v->is_later_fragment) return (fragment & 0x1fff) < FRAGMENT_LEAST_UNITS ? -1 : 0;
  return v->protocol == V6_FRAGMENT || (v->protocol == TSMP && fragment) ? -1 : 0;
}

static int view_v6(packet_view *v, const uint8_t *p, uint32_t bytes) {
  if (load_be16(p + 4) + 40u > bytes) return -1;
  *v = (packet_view){p + 8, p + 24, p + 40, 16, bytes - 40, p[6], 0};
  if (v->protocol != V6_FRAGMENT) return 0;
  if (bytes < 48) return -1;
  uint32_t units = load_be16(p + 42) >> 3;
  v->is_later_fragment = units != 0;
  v->protocol = p[40];
  v->transport += 8;
  v->transport_bytes -= 8;
  return units && units < FRAGMENT_LEAST_UNITS ? -1 : 0;
}

/* -1: somebody else must look. Hop-by-hop and the like are protocols without a name here. */
static int view(packet_view *v, const uint8_t *p, uint32_t bytes) {
  int failed = -1;
  if (bytes >= 20 && p[0] >> 4 == 4) failed = view_v4(v, p, bytes);
  else if (bytes >= 40 && p[0] >> 4 == 6) failed = view_v6(v, p, bytes);
  if (failed) return -1;
  if (v->is_later_fragment) return 0;
  uint32_t least = v->protocol == TCP ? 20 : v->protocol == UDP ? 8 : v->protocol == SCTP ? 12 : 0;
  if (v->protocol == ICMP || v->protocol == ICMP6) least = 4;
  return v->transport_bytes < least ? -1 : 0;
}

/* Multicast and link-local: other rules hold. */
static int is_special(const packet_view *v) {
  const uint8_t *d = v->destination;
  if (v->address_bytes == 4) return d[0] >> 4 == 14 || (d[0] == 169 && d[1] == 254);
  return d[0] == 0xff || (d[0] == 0xfe && (d[1] & 0xc0) == 0x80);
}

static int has_ports(const packet_view *v) { return v->protocol == UDP || v->protocol == TCP || v->protocol == SCTP; }

static int is_icmp_answer(const packet_view *v) {
  uint32_t type = v->transport[0];
  if (v->protocol == ICMP && v->address_bytes == 4) return type == 0 || type == 3 || type == 11 || type == 12;
  return v->protocol == ICMP6 && v->address_bytes == 16 && (type == 129 || (type >= 1 && type <= 4));
}

int filter_init(flow_filter *f) {
  f->sets = calloc(FLOW_SETS, sizeof *f->sets);
  if (!f->sets) return -1;
  return pthread_mutex_init(&f->lock, NULL) ? -1 : 0;
}

void filter_free(flow_filter *f) {
  if (!f->sets) return;
  allowed_free(&f->local);
  free(f->sets);
  table_free(&f->guarded);
  pthread_mutex_destroy(&f->lock);
}

/* The key of an inbound packet; of an outbound one it is that of its answers. */
static flow make_flow(const packet_view *v, int answers, int by_rule) {
  flow k = {.protocol = v->protocol, .family = (uint8_t)v->address_bytes, .by_rule = (uint8_t)by_rule, .used = 1};
  memcpy(answers ? k.destination : k.source, v->source, v->address_bytes);
  memcpy(answers ? k.source : k.destination, v->destination, v->address_bytes);
  if (!has_ports(v)) return k;
  memcpy(answers ? &k.destination_port : &k.source_port, v->transport, 2);
  memcpy(answers ? &k.source_port : &k.destination_port, v->transport + 2, 2);
  if (by_rule) k.source_port = 0;
  return k;
}

static int same_key(const flow *a, const flow *b) { return !memcmp(a, b, offsetof(flow, epoch)); }

static flow *set_of(flow_filter *f, const flow *k) {
  uint64_t mixed = 0;
  for (uint32_t i = 0; i < 40; i += 8) mixed = (mixed ^ load_le64((const uint8_t *)k + i)) * 0x9E3779B97F4A7C15ull;
  return f->sets[mixed >> 52];
}

static int lookup(flow_filter *f, const flow *k) {
  flow *set = set_of(f, k);
  for (int i = 0; i < FLOW_WAYS; i++)
    if (same_key(&set[i], k) && (!k->by_rule || set[i].epoch == f->epoch)) {
      set[i].last_use = ++f->uses;
      return 1;
    }
  return 0;
}

static void insert(flow_filter *f, const flow *k) {
  flow *set = set_of(f, k), *oldest = set;
  for (int i = 0; i < FLOW_WAYS; i++) {
    if (same_key(&set[i], k)) {
      oldest = &set[i];
      break;
    }
    if (set[i].last_use < oldest->last_use) oldest = &set[i];
  }
  *oldest = *k;
  oldest->epoch = f->epoch;
  oldest->last_use = ++f->uses;
}

enum filter_verdict filter_outbound(flow_filter *f, const uint8_t *packet, uint32_t bytes) {
  packet_view v;
  if (view(&v, packet, bytes) || is_special(&v) || v.protocol == TSMP) return FILTER_ASK;
  if (v.is_later_fragment || (v.protocol != UDP && v.protocol != SCTP)) return FILTER_PASS;
  flow answers = make_flow(&v, 1, 0);
  pthread_mutex_lock(&f->lock);
  if (!same_key(&answers, &f->newest)) {
    insert(f, &answers);
    f->newest = answers;
  }
  pthread_mutex_unlock(&f->lock);
  return FILTER_PASS;
}

void filter_begin(flow_filter *f) { pthread_mutex_lock(&f->lock); }
void filter_end(flow_filter *f) { pthread_mutex_unlock(&f->lock); }

static int is_guarded(const flow_filter *f, int64_t peer) {
  return table_get(&f->guarded, (uint64_t)peer) != NULL;
}

static int is_disco(const packet_view *v) {
  static const uint8_t magic[6] = {0x54, 0x53, 0xf0, 0x9f, 0x92, 0xac};
  return v->protocol == UDP && v->transport_bytes >= 14 && !memcmp(v->transport + 8, magic, 6);
}

enum filter_verdict filter_inbound(flow_filter *f, int64_t peer, const uint8_t *packet, uint32_t bytes) {
  packet_view v;
  if (is_guarded(f, peer) || view(&v, packet, bytes) || is_special(&v) || v.protocol == TSMP)
    return FILTER_ASK;
  if (!allowed_find(&f->local, v.destination, v.address_bytes)) return FILTER_ASK;
  if (v.is_later_fragment) return FILTER_PASS;
  if (v.protocol == TCP && (v.transport[13] & (TCP_SYN | TCP_ACK)) != TCP_SYN) return FILTER_PASS;
  if ((v.protocol == ICMP || v.protocol == ICMP6) && is_icmp_answer(&v))
    return atomic_load_explicit(&f->watches_icmp, memory_order_relaxed) ? FILTER_ASK : FILTER_PASS;
  if (is_disco(&v)) return FILTER_ASK;
  flow key = make_flow(&v, 0, 0);
  if ((v.protocol == UDP || v.protocol == SCTP) && lookup(f, &key)) return FILTER_PASS;
  key.by_rule = 1;
  key.source_port = 0;
  return lookup(f, &key) ? FILTER_PASS : FILTER_ASK;
}

int fdpump_set_local(fdpump *p, const core_prefix *prefixes, size_t prefix_count) {
  flow_filter *f = &p->filter;
  int failed = 0;
  pthread_mutex_lock(&f->lock);
  f->epoch++;
  allowed_clear(&f->local, &f->owner);
  for (size_t i = 0; !failed && i < prefix_count; i++)
    failed = allowed_add(&f->local, &f->owner, prefixes[i].address, prefixes[i].bytes, prefixes[i].bits);
  pthread_mutex_unlock(&f->lock);
  return failed;
}

void fdpump_allow_like(fdpump *p, const uint8_t *packet, uint32_t bytes) {
  packet_view v;
  if (view(&v, packet, bytes) || v.is_later_fragment || v.protocol == TSMP) return;
  flow key = make_flow(&v, 0, 1);
  pthread_mutex_lock(&p->filter.lock);
  insert(&p->filter, &key);
  pthread_mutex_unlock(&p->filter.lock);
}

void fdpump_forget_flows(fdpump *p) {
  pthread_mutex_lock(&p->filter.lock);
  memset(p->filter.sets, 0, FLOW_SETS * sizeof *p->filter.sets);
  memset(&p->filter.newest, 0, sizeof p->filter.newest);
  pthread_mutex_unlock(&p->filter.lock);
}

int fdpump_set_guarded(fdpump *p, const int64_t *peers, size_t peer_count) {
  static char mark; /* what the table holds is never looked at */
  table fresh = {0}, former;
  int failed = 0;
  for (size_t i = 0; i < peer_count; i++) failed |= table_put(&fresh, (uint64_t)peers[i], &mark);
  if (failed) {
    table_free(&fresh);
    return -1;
  }
  for (size_t i = 0; i < peer_count; i++) core_set_by_hand(p->core, peers[i], 1);
  pthread_mutex_lock(&p->filter.lock);
  former = p->filter.guarded;
  p->filter.guarded = fresh;
  pthread_mutex_unlock(&p->filter.lock);
  for (uint32_t i = 0; i < former.capacity; i++) /* who stays is guarded all the time */
    if (former.slots[i].value && !table_get(&fresh, former.slots[i].key))
      core_set_by_hand(p->core, (int64_t)former.slots[i].key, 0);
  table_free(&former);
  return 0;
}

void fdpump_watch_icmp(fdpump *p, int on) { atomic_store(&p->filter.watches_icmp, on); }

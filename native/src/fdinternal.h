/* What the parts of the pump on file descriptors share. */
#ifndef TSN_FDINTERNAL_H
#define TSN_FDINTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "allowedips.h"
#include "fdpump.h"
#include "internal.h"

#if defined(__linux__) && !defined(TSN_PORTABLE_IO)
#define FD_LINUX 1
#else
#define FD_LINUX 0
#endif

#define VNET_BYTES 10
#define FRAME_MOST_BYTES 65536
#define TX_BUFFER_BYTES (256u << 10)
#define TX_FULL_BYTES 56000 /* of sealed output: one segmented send */
#define TX_MOST_FRAMES 64
#define RX_BUFFERS 4
#define SEND_MOST_MESSAGES 64

typedef struct {
  pthread_mutex_t lock;
  uint8_t *memory;
  uint32_t capacity;
  uint64_t head, tail; /* written, taken */
  int signalled;
  int wake[2]; /* read end, write end; the same for an eventfd */
} up_ring;

int ring_init(up_ring *r, uint32_t bytes);
void ring_free(up_ring *r);
/* 0, or -1 when there is no room. */
int ring_put(up_ring *r, const up_message *m, const struct iovec *parts, int part_count);

int wake_open(int wake[2]);
void wake_close(int wake[2]);
void wake_ring(const int wake[2]);
void wake_clear(const int wake[2]);

#define FLOW_SETS 4096
#define FLOW_WAYS 4

typedef struct {
  uint8_t source[16], destination[16];
  uint16_t source_port, destination_port; /* as on the wire */
  uint8_t protocol, family;
  uint8_t by_rule; /* not a flow of ours; source_port is 0 then */
  uint8_t used;
  uint32_t epoch; /* of the rules */
  uint64_t last_use;
} flow;

enum filter_verdict { FILTER_PASS, FILTER_ASK };

typedef struct {
  pthread_mutex_t lock;
  allowed_table local;
  allowed_owner owner;
  flow (*sets)[FLOW_WAYS];
  uint64_t uses;
  uint32_t epoch;
  table guarded; /* handles */
  flow newest; /* outbound: spares the table for a stream */
  atomic_int watches_icmp;
} flow_filter;

int filter_init(flow_filter *f);
void filter_free(flow_filter *f);
/* Of a packet of the host that goes to a peer. PASS or ASK. */
enum filter_verdict filter_outbound(flow_filter *f, const uint8_t *packet, uint32_t bytes);
/* Several inbound packets under one lock: begin, judge each, end. */
void filter_begin(flow_filter *f);
enum filter_verdict filter_inbound(flow_filter *f, int64_t peer, const uint8_t *packet, uint32_t bytes);
void filter_end(flow_filter *f);

typedef struct {
  int64_t peer;
  double last_report;
  double last_error;
  double last_attention;
  uint64_t source; /* hash of where it was heard */
  uint8_t attention_due;
} peer_note;

struct fdpump {
  core *core;
  fdpump_options options;
  up_ring ring;
  flow_filter filter;
  atomic_int stopping, udp_gso[2], tun_tcp_gso, tun_udp_gso;
  int stop_wake[2];
  pthread_t threads[2];
  int thread_count;
  _Atomic uint64_t counters[FD_COUNTERS];
  pthread_mutex_t notes_lock;
  table notes; /* handle to peer_note */
  atomic_int attention_due;
  double next_late;
  struct tx_worker *tx;
  struct rx_worker *rx;
};

static inline void count(fdpump *p, enum fd_counter which, uint64_t by) {
  atomic_fetch_add_explicit(&p->counters[which], by, memory_order_relaxed);
}

double fd_now(void);

/* Up. Counted when the ring is full. */
/* 0, or -1: lost. */
int up_simple(fdpump *p, enum up_kind kind, int64_t peer, uint32_t detail);
void up_bytes(fdpump *p, enum up_kind kind, int64_t peer, uint32_t unit, const struct iovec *parts, int part_count);
void up_from(fdpump *p, enum up_kind kind, int64_t peer, uint32_t detail, const struct sockaddr_storage *source,
             const uint8_t *data, uint32_t bytes);
void up_attention(fdpump *p, const int64_t *peers, size_t peer_count, double now);
void up_heard(fdpump *p, int64_t peer, const struct sockaddr_storage *source, double now);
void up_late_attention(fdpump *p, double (*now)(void));
void up_send_error(fdpump *p, int64_t peer, int error, const struct sockaddr_storage *target);
void notes_forget(fdpump *p);

/* UDP */
typedef struct {
  uint8_t *at;
  uint32_t bytes, unit;
  struct sockaddr_storage source;
} udp_arrival;

void udp_send_runs(fdpump *p, const core_run *runs, size_t run_count);
/* Fills up to RX_BUFFERS arrivals; does not block. Number of them. */
int udp_receive(fdpump *p, int family, uint8_t *const buffers[RX_BUFFERS], udp_arrival *out);

/* TUN */
/* Turns what was read into a frame; finishes checksums and lowers the MSS in place. -1: malformed. */
int tun_parse(fdpump *p, uint8_t *raw, uint32_t bytes, core_frame *out);
/* Writes an item of the coalescer, whose memory may be changed. */
void tun_write_item(fdpump *p, coalescer *c, coalesce_item *item);

typedef struct tx_worker tx_worker;
typedef struct rx_worker rx_worker;
tx_worker *tx_new(fdpump *p);
void tx_free(tx_worker *t);
int tx_once(tx_worker *t); /* frames read; -1: the TUN is gone */
rx_worker *rx_new(fdpump *p);
void rx_free(rx_worker *x);
int rx_once(rx_worker *x); /* datagrams received */

#endif

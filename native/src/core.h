/* The native core of the data plane: the contract of `tsd/dataplane/pump.py` in C, without Python.
 *
 * A seal runs in two halves so that the caller can own the output: `core_plan_seal` routes, cuts and counts,
 * the caller fills in `out` of every run, `core_run_seal` writes. An open likewise: `core_run_open` decrypts, judges and
 * coalesces into private memory, the caller fills in `out` of every delivery, `core_write_opened` gathers.
 * One caller at a time; nothing here blocks, and memory grows only to the largest batch seen. */
#ifndef TSN_CORE_H
#define TSN_CORE_H

#include <stddef.h>
#include <stdint.h>

#define CORE_ABI 1

#define RUN_MOST_DATAGRAMS 64
#define RUN_MOST_BYTES 65000
#define PACKET_MOST_BYTES 64960 /* a larger one would not fit a run */

typedef struct core core;

enum core_drop {
  DROP_MALFORMED,
  DROP_NO_PEER,
  DROP_TOO_BIG,
  DROP_NO_SESSION,
  DROP_EXPIRED,
  DROP_AUTH,
  DROP_REPLAY,
  DROP_SOURCE,
  DROP_SHORT,
  DROP_UNKNOWN_TYPE,
  DROP_BAD_LENGTH,
  DROP_COUNT
};

/* "no_peer" and so on; NULL past the last. */
const char *core_drop_name(int drop);

typedef struct {
  const uint8_t *packet;
  size_t bytes;
  int32_t segment_bytes; /* negative: not a frame */
} core_frame;

/* Datagrams for one peer, back to back. */
typedef struct {
  int64_t peer;
  uint8_t *out; /* filled in by the caller */
  uint32_t bytes, datagram_bytes, count;
} core_run;

typedef struct {
  int64_t peer;
  uint32_t frame;
} core_refused;

typedef struct {
  int64_t peer;
  uint8_t *out; /* filled in by the caller */
  uint32_t bytes, segment_bytes;
} core_delivery;

typedef struct {
  int kind; /* Other of pump.py */
  uint32_t at, bytes;
} core_other;

typedef struct {
  double first_unanswered_send, first_unreplied_receive, last_send, last_receive, session_created;
  int is_initiator, has_current, has_next, rekey_wanted;
  uint64_t rx_bytes, tx_bytes, rx_packets, tx_packets;
} core_activity;

typedef struct {
  core_run *runs;
  const core_refused *refused;
  const int64_t *attention;
  size_t run_count, refused_count, attention_count;
} core_seal_result;

typedef struct {
  core_delivery *deliveries;
  const core_other *others;
  const int64_t *authenticated, *confirmed, *attention;
  size_t delivery_count, other_count, authenticated_count, confirmed_count, attention_count;
} core_open_result;

/* `kernel`: see aead_find. NULL: out of memory, unknown kernel, or its self-test failed. */
core *core_new(uint32_t mtu_bytes, const char *kernel);
void core_free(core *c);
const char *core_kernel_name(const core *c);
const uint64_t *core_drops(const core *c);

/* 0, or -1 when out of memory; a peer that is not known is left out. */
int core_add_peer(core *c, int64_t peer);
void core_remove_peer(core *c, int64_t peer);
int core_has_peer(const core *c, int64_t peer);
void core_clear_allowed(core *c, int64_t peer);
int core_add_allowed(core *c, int64_t peer, const uint8_t *address, uint32_t bytes, uint32_t prefix_bits);
/* 1 and the peer, or 0. */
int core_route(const core *c, const uint8_t *address, uint32_t bytes, int64_t *peer);
int core_install_session(core *c, int64_t peer, uint32_t local_index, uint32_t remote_index, const uint8_t send_key[32],
                         const uint8_t receive_key[32], int is_initiator, double now);
void core_drop_sessions(core *c, int64_t peer);
/* All zero for a peer that is not known. */
void core_get_activity(const core *c, int64_t peer, core_activity *out);

int core_plan_seal(core *c, const core_frame *frames, size_t count, double now, core_seal_result *result);
/* Without routing; an empty frame is a keepalive. No session, no runs. */
int core_plan_seal_to(core *c, int64_t peer, const core_frame *frames, size_t count, double now, core_seal_result *result);
void core_run_seal(core *c);

/* `datagram_bytes` 0: all of it is one datagram. */
int core_run_open(core *c, const uint8_t *datagrams, size_t bytes, size_t datagram_bytes, double now,
                  core_open_result *result);
void core_write_opened(core *c);

#endif

/* The native core of the data plane: the contract of `tsd/dataplane/pump.py` in C, without Python.
 *
 * A seal runs in two halves so that the caller can own the output: `core_plan_seal` routes, cuts and counts,
 * the caller fills in `out` of every run, `core_run_seal` writes. An open likewise: `core_run_open` decrypts, judges and
 * coalesces into private memory, the caller fills in `out` of every delivery, `core_write_opened` gathers.
 *
 * A core may be used by many threads, each with a `core_work` of its own. A short lock guards peers, sessions, counters
 * and tables; it is never held while packets are sealed, opened or copied: a plan takes copies of the keys and its own
 * counters, so that sessions may come and go meanwhile. Memory grows only to the largest batch seen. */
#ifndef TSN_CORE_H
#define TSN_CORE_H

#include <stddef.h>
#include <stdint.h>

#define CORE_ABI 3

#define RUN_MOST_DATAGRAMS 64
#define RUN_MOST_BYTES 65000
#define PACKET_MOST_BYTES 64960 /* a larger one would not fit a run */

typedef struct core core;
typedef struct core_work core_work;

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
  uint32_t is_udp;       /* the super-segment may be UDP (USO), which pump.py does not know */
} core_frame;

typedef struct {
  uint8_t address[16];
  uint32_t bytes, bits; /* bytes: 4 or 16 */
} core_prefix;

/* Where the sealed batches of a peer go. */
typedef struct {
  uint8_t family;  /* 4, 6, or 0: no UDP address */
  uint8_t up;      /* to the caller, who has a relay; together with an address: both */
  uint8_t no_gso;  /* segmented sends were refused on this path */
  uint16_t port;   /* host order */
  uint8_t ip[16];
  uint32_t scope;
} core_path;

/* Datagrams for one peer, back to back. */
typedef struct {
  int64_t peer;
  uint8_t *out; /* filled in by the caller */
  uint32_t bytes, datagram_bytes, count;
  core_path path;
} core_run;

typedef struct {
  int64_t peer;
  uint32_t frame;
  uint32_t no_peer; /* `peer` means nothing: only with `keep_unrouted` */
} core_refused;

/* Datagrams as they came from one source; `source` is any number that helps the caller. */
typedef struct {
  uint8_t *datagrams;
  size_t bytes, datagram_bytes;
  uint32_t source;
} core_buffer;

typedef struct {
  int64_t peer;
  uint8_t *out; /* filled in by the caller */
  uint32_t bytes, segment_bytes;
} core_delivery;

typedef struct {
  int kind; /* Other of pump.py */
  uint32_t at, bytes;
  const uint8_t *datagram;
  uint32_t source; /* as given with the datagrams */
} core_other;

/* A peer that spoke in this call, and from where the last authentic datagram came. */
typedef struct {
  int64_t peer;
  uint32_t source;
} core_heard;

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
  const core_heard *heard; /* one for each of `authenticated` */
  size_t delivery_count, other_count, authenticated_count, confirmed_count, attention_count;
} core_open_result;

/* `kernel`: see aead_find. NULL: out of memory, unknown kernel, or its self-test failed. */
core *core_new(uint32_t mtu_bytes, const char *kernel);
void core_free(core *c);
const char *core_kernel_name(const core *c);
void core_get_drops(core *c, uint64_t drops[DROP_COUNT]);

/* 0, or -1 when out of memory; a peer that is not known is left out. */
int core_add_peer(core *c, int64_t peer);
void core_remove_peer(core *c, int64_t peer);
int core_has_peer(core *c, int64_t peer);
/* Replaces, in one step for those who route meanwhile. */
int core_set_allowed(core *c, int64_t peer, const core_prefix *prefixes, size_t count);
/* 1 and the peer, or 0. */
int core_route(core *c, const uint8_t *address, uint32_t bytes, int64_t *peer);
int core_install_session(core *c, int64_t peer, uint32_t local_index, uint32_t remote_index, const uint8_t send_key[32],
                         const uint8_t receive_key[32], int is_initiator, double now);
void core_drop_sessions(core *c, int64_t peer);
/* All zero for a peer that is not known. */
void core_get_activity(core *c, int64_t peer, core_activity *out);

/* For a peer that is not known: nothing happens. */
void core_set_path(core *c, int64_t peer, const core_path *path);
void core_refuse_gso(core *c, int64_t peer, const core_path *path); /* unless the path is another by now */

core_work *core_work_new(core *c);
void core_work_free(core_work *w);

/* While on, `keep_unrouted` treats frames for this peer as if there were no peer: somebody else must look at them. */
void core_set_by_hand(core *c, int64_t peer, int on);

/* `keep_unrouted`: frames without a peer are listed as refused, not counted as a drop. */
int core_plan_seal(core_work *w, const core_frame *frames, size_t count, double now, int keep_unrouted,
                   core_seal_result *result);
/* Without routing; an empty frame is a keepalive. No session, no runs. */
int core_plan_seal_to(core_work *w, int64_t peer, const core_frame *frames, size_t count, double now,
                      core_seal_result *result);
void core_run_seal(core_work *w);

/* `datagram_bytes` 0: all of it is one datagram. */
int core_run_open(core_work *w, const uint8_t *datagrams, size_t bytes, size_t datagram_bytes, double now,
                  core_open_result *result);
void core_write_opened(core_work *w);

/* The same for several buffers in one call, decrypted in place. */
int core_open_buffers(core_work *w, const core_buffer *buffers, size_t count, double now, core_open_result *result);
/* UDP is coalesced too, as pump.py does not. */
void core_coalesce_udp(core_work *w, int wanted);

#endif

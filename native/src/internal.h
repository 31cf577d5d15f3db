/* What core.c, seal.c and open.c share. */
#ifndef TSN_INTERNAL_H
#define TSN_INTERNAL_H

#include <pthread.h>

#include "aead.h"
#include "allowedips.h"
#include "bits.h"
#include "coalesce.h"
#include "core.h"
#include "replay.h"
#include "segment.h"
#include "table.h"

#define REKEY_AFTER_S 120.0
#define REKEY_LAST_CHANCE_S 165.0
#define REJECT_AFTER_S 180.0
#define REKEY_AFTER_MESSAGES (1ull << 60)

#define MESSAGE_TRANSPORT 4
#define TRANSPORT_HEADER_BYTES 16
#define TRANSPORT_OVERHEAD_BYTES (TRANSPORT_HEADER_BYTES + AEAD_TAG_BYTES)
#define KERNEL_BATCH 64
#define NONE UINT32_MAX

typedef struct peer peer;

typedef struct session {
  aead_key send_key, receive_key;
  uint32_t local_index, remote_index;
  uint64_t send_counter;
  double created;
  peer *owner;
  uint64_t serial; /* never given twice: an index is */
  int is_initiator;
  uint64_t work_call; /* the call in which it has a group, and which */
  uint32_t work_group;
  replay_window replay;
} session;

struct peer {
  allowed_owner allowed; /* first: an owner is a peer */
  int64_t handle;
  session *current, *previous, *next;
  core_path path;
  int by_hand; /* its frames go to the caller, sealed by nobody (`keep_unrouted`) */
  core_activity activity; /* of the session fields only rekey_wanted is kept here */
  uint64_t attention_call, authenticated_call, confirmed_call; /* last call in which it was listed */
  uint64_t send_call;
  uint32_t open_run, sent_datagrams, sent_bytes; /* of the call `send_call` */
  peer *next_sender;
  uint32_t heard_at; /* place in `heard` of the call `authenticated_call` */
};

typedef struct {
  int64_t *values;
  size_t count, capacity;
} handle_list;

/* One datagram to be sealed. */
typedef struct {
  const uint8_t *plain;
  uint32_t plain_bytes, padded_bytes;
  uint32_t source, piece; /* of a super-segment; source NONE: plain */
  uint32_t run, run_at;
  uint32_t next;
  uint64_t counter;
} seal_job;

/* One datagram that claims to be transport data. */
typedef struct {
  const uint8_t *datagram;
  uint8_t *plain;
  uint32_t bytes, plain_bytes;
  uint32_t local_index, source;
  uint64_t serial; /* of the session */
  int64_t peer;    /* once judged */
  uint32_t next, ok;
  uint32_t inner_bytes; /* once judged: of the IP packet to deliver, or 0 */
} open_job;

/* The jobs of one session in one call, with a copy of its key. */
typedef struct {
  aead_key key;
  uint32_t remote_index;
  uint32_t first, last;
} job_group;

struct core {
  const aead_kernel *kernel;
  uint32_t mtu_bytes;
  pthread_mutex_t lock; /* of everything below */
  table peers, sessions;
  allowed_table allowed;
  uint64_t drops[DROP_COUNT];
  uint64_t call, last_serial;
};

/* What one caller needs for one batch. */
struct core_work {
  core *core;
  uint64_t call; /* the core's number for it */
  handle_list attention, authenticated, confirmed;
  job_group *groups;
  size_t group_count, group_capacity;

  seal_job *jobs;
  segment_source *sources;
  core_run *runs;
  core_refused *refused;
  size_t job_count, job_capacity, source_count, source_capacity, run_count, run_capacity, refused_count, refused_capacity;
  peer *first_sender, *last_sender;

  open_job *open_jobs;
  core_other *others;
  core_delivery *deliveries;
  core_heard *heard;
  uint8_t *plain;
  size_t open_count, open_capacity, other_count, other_capacity, delivery_capacity, plain_capacity, heard_capacity;
  coalescer coalescer;
};

static inline void lock_core(core *c) { pthread_mutex_lock(&c->lock); }
static inline void unlock_core(core *c) { pthread_mutex_unlock(&c->lock); }

/* Room for `count` elements in a growing array. 0, or -1 when out of memory. */
int reserve(void *array, size_t *capacity, size_t count, size_t element_bytes);

/* Appends unless the peer is listed in this call already; `mark` is the peer's stamp for that list. */
int list_once(core_work *w, handle_list *list, peer *p, uint64_t *mark);

peer *find_peer(const core *c, int64_t handle);
/* A new call; the lock is held. Calls of other workers may begin and end before the next use of the lock: what hangs on
 * stamps (lists, groups, open runs) must be done in one stretch under the lock, or begun anew with a new number. */
void begin_call(core_work *w);

/* Puts a job (its number, and where its link is) behind the others of its session in this call. Gives the number of
 * the former last job, whose link the caller sets, or NONE. -1: out of memory. */
int chain_job(core_work *w, session *s, const aead_key *key, uint32_t job, uint32_t *former);
void wipe_groups(core_work *w);

#endif

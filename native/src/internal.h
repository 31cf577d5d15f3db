/* What core.c, seal.c and open.c share. */
#ifndef TSN_INTERNAL_H
#define TSN_INTERNAL_H

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
  int is_initiator;
  uint32_t work_first, work_last; /* jobs of this call */
  uint64_t work_call;
  struct session *next_touched;
  replay_window replay;
} session;

struct peer {
  allowed_owner allowed; /* first: an owner is a peer */
  int64_t handle;
  session *current, *previous, *next;
  core_activity activity; /* of the session fields only rekey_wanted is kept here */
  uint64_t attention_call, authenticated_call, confirmed_call; /* last call in which it was listed */
  uint64_t send_call;
  uint32_t open_run, sent_datagrams, sent_bytes; /* of the call `send_call` */
  peer *next_sender;
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
  session *session;
  uint32_t next, ok;
} open_job;

struct core {
  const aead_kernel *kernel;
  uint32_t mtu_bytes;
  table peers, sessions;
  allowed_table allowed;
  uint64_t drops[DROP_COUNT];
  uint64_t call;
  session *touched; /* sessions with work in this call */
  handle_list attention, authenticated, confirmed;

  seal_job *jobs;
  segment_source *sources;
  core_run *runs;
  core_refused *refused;
  size_t job_count, job_capacity, source_count, source_capacity, run_count, run_capacity, refused_count, refused_capacity;

  open_job *open_jobs;
  core_other *others;
  core_delivery *deliveries;
  uint8_t *plain;
  size_t open_count, open_capacity, other_count, other_capacity, delivery_capacity, plain_capacity;
  coalescer coalescer;
  peer *first_sender, *last_sender;
};

/* Room for `count` elements in a growing array. 0, or -1 when out of memory. */
int reserve(void *array, size_t *capacity, size_t count, size_t element_bytes);

/* Appends unless the peer is listed in this call already; `mark` is the peer's stamp for that list. */
int list_once(core *c, handle_list *list, peer *p, uint64_t *mark);

peer *find_peer(const core *c, int64_t handle);
void begin_call(core *c);

/* Puts a job (its number, and where its link is) behind the others of its session in this call.
 * Returns the number of the former last job, whose link the caller sets, or NONE. */
uint32_t chain_job(core *c, session *s, uint32_t job);

#endif

/* The replay window of one receive key: 8128 counters in a ring of 128 words (RFC 6479; wireguard-go: `replay/replay.go`).
 * Asked after a packet proved authentic. */
#ifndef TSN_REPLAY_H
#define TSN_REPLAY_H

#include <stdint.h>

#define REPLAY_WORDS 128
#define REPLAY_WINDOW ((REPLAY_WORDS - 1) * 64u)
#define REJECT_AFTER_MESSAGES (UINT64_MAX - (1u << 13))

typedef struct {
  uint64_t last;
  uint64_t ring[REPLAY_WORDS];
} replay_window;

/* 1 when the counter is new, which it then is no more. */
int replay_accept(replay_window *w, uint64_t counter);

#endif

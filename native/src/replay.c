#include "replay.h"

int replay_accept(replay_window *w, uint64_t counter) {
  if (counter >= REJECT_AFTER_MESSAGES) return 0;
  uint64_t word = counter >> 6, bit = 1ull << (counter & 63);
  if (counter > w->last) {
    uint64_t newest = w->last >> 6, fresh = word - newest;
    if (fresh > REPLAY_WORDS) fresh = REPLAY_WORDS;
    for (uint64_t i = 1; i <= fresh; i++) w->ring[(newest + i) % REPLAY_WORDS] = 0;
    w->last = counter;
  } else if (w->last - counter > REPLAY_WINDOW) {
    return 0;
  }
  if (w->ring[word % REPLAY_WORDS] & bit) return 0;
  w->ring[word % REPLAY_WORDS] |= bit;
  return 1;
}

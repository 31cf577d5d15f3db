#include "table.h"

#include <stdlib.h>

static uint32_t home(const table *t, uint64_t key) {
  return (uint32_t)((key * 0x9E3779B97F4A7C15ull) >> 32) & (t->capacity - 1);
}

/* The slot of a key, or the free slot where it would go. */
static uint32_t locate(const table *t, uint64_t key) {
  uint32_t at = home(t, key);
  while (t->slots[at].value && t->slots[at].key != key) at = (at + 1) & (t->capacity - 1);
  return at;
}

void *table_get(const table *t, uint64_t key) { return t->used ? t->slots[locate(t, key)].value : NULL; }

static int grow(table *t) {
  table bigger = {.capacity = t->capacity ? t->capacity * 2 : 64, .used = t->used};
  bigger.slots = calloc(bigger.capacity, sizeof *bigger.slots);
  if (!bigger.slots) return -1;
  for (uint32_t i = 0; i < t->capacity; i++)
    if (t->slots[i].value) bigger.slots[locate(&bigger, t->slots[i].key)] = t->slots[i];
  free(t->slots);
  *t = bigger;
  return 0;
}

int table_put(table *t, uint64_t key, void *value) {
  if (t->used * 2 >= t->capacity && grow(t)) return -1;
  table_slot *slot = &t->slots[locate(t, key)];
  t->used += !slot->value;
  *slot = (table_slot){key, value};
  return 0;
}

void table_remove(table *t, uint64_t key) {
  if (!t->used) return;
  uint32_t mask = t->capacity - 1, hole = locate(t, key);
  if (!t->slots[hole].value) return;
  t->used--;
  for (uint32_t at = (hole + 1) & mask; t->slots[at].value; at = (at + 1) & mask) {
    uint32_t wanted = home(t, t->slots[at].key);
    if (((at - wanted) & mask) < ((at - hole) & mask)) continue; /* it would come to lie before its home */
    t->slots[hole] = t->slots[at];
    hole = at;
  }
  t->slots[hole].value = NULL;
}

void table_free(table *t) {
  free(t->slots);
  *t = (table){0};
}

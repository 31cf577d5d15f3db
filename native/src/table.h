/* A hash table from 64-bit numbers to pointers: session indices and peer handles. Open addressing, linear probing. */
#ifndef TSN_TABLE_H
#define TSN_TABLE_H

#include <stdint.h>

typedef struct {
  uint64_t key;
  void *value; /* NULL: free */
} table_slot;

typedef struct {
  table_slot *slots;
  uint32_t capacity; /* power of two, or 0 */
  uint32_t used;
} table;

void *table_get(const table *t, uint64_t key);
/* Replaces. -1: out of memory. */
int table_put(table *t, uint64_t key, void *value);
void table_remove(table *t, uint64_t key);
void table_free(table *t);

#endif

/* Allowed IPs: a path-compressed binary trie per family, longest prefix wins, one owner per prefix. */
#ifndef TSN_ALLOWEDIPS_H
#define TSN_ALLOWEDIPS_H

#include <stdint.h>

typedef struct allowed_node allowed_node;

typedef struct {
  allowed_node *roots[2]; /* IPv4, IPv6 */
} allowed_table;

/* Embedded in whoever owns prefixes. */
typedef struct {
  allowed_node *first;
} allowed_owner;

/* `bytes` is 4 or 16, host bits are ignored. -1: out of memory. A prefix with another owner moves. */
int allowed_add(allowed_table *table, allowed_owner *owner, const uint8_t *address, uint32_t bytes, uint32_t prefix_bits);
void allowed_clear(allowed_table *table, allowed_owner *owner);
allowed_owner *allowed_find(const allowed_table *table, const uint8_t *address, uint32_t bytes);
void allowed_free(allowed_table *table);

#endif

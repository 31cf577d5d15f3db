#include "allowedips.h"

#include <stdlib.h>

#include "bits.h"

/* An address as a 128-bit number, left-aligned: IPv4 fills the top 32 bits. */
typedef struct {
  uint64_t high, low;
} address_key;

struct allowed_node {
  address_key key;
  allowed_node *child[2], *parent;
  allowed_owner *owner; /* NULL: only a fork */
  allowed_node *previous, *next; /* of the same owner */
  uint8_t prefix_bits, family;
};

static address_key make_key(const uint8_t *address, uint32_t bytes) {
  if (bytes == 4) return (address_key){(uint64_t)load_be32(address) << 32, 0};
  return (address_key){__builtin_bswap64(load_le64(address)), __builtin_bswap64(load_le64(address + 8))};
}

static address_key truncate_key(address_key key, uint32_t bits) {
  if (bits == 0) return (address_key){0, 0};
  if (bits <= 64) return (address_key){key.high & ~0ull << (64 - bits), 0};
  return (address_key){key.high, bits == 128 ? key.low : key.low & ~0ull << (128 - bits)};
}

TSN_INLINE uint32_t common_bits(address_key a, address_key b) {
  uint64_t high = a.high ^ b.high, low = a.low ^ b.low;
  if (high) return (uint32_t)__builtin_clzll(high);
  return low ? 64 + (uint32_t)__builtin_clzll(low) : 128;
}

TSN_INLINE uint32_t bit_at(address_key key, uint32_t at) {
  return (uint32_t)(at < 64 ? key.high >> (63 - at) : key.low >> (127 - at)) & 1;
}

static allowed_node **slot_of(allowed_table *table, allowed_node *node) {
  if (!node->parent) return &table->roots[node->family];
  return &node->parent->child[node->parent->child[1] == node];
}

static void give(allowed_node *node, allowed_owner *owner) {
  if (node->owner) {
    if (node->previous) node->previous->next = node->next;
    else node->owner->first = node->next;
    if (node->next) node->next->previous = node->previous;
  }
  node->owner = owner;
  node->previous = NULL;
  node->next = owner ? owner->first : NULL;
  if (node->next) node->next->previous = node;
  if (owner) owner->first = node;
}

static allowed_node *new_node(address_key key, uint32_t prefix_bits, uint32_t family, allowed_node *parent) {
  allowed_node *node = calloc(1, sizeof *node);
  if (!node) return NULL;
  node->key = truncate_key(key, prefix_bits);
  node->prefix_bits = (uint8_t)prefix_bits;
  node->family = (uint8_t)family;
  node->parent = parent;
  return node;
}

static void adopt(allowed_node *parent, allowed_node *child) {
  parent->child[bit_at(child->key, parent->prefix_bits)] = child;
  child->parent = parent;
}

int allowed_add(allowed_table *table, allowed_owner *owner, const uint8_t *address, uint32_t bytes, uint32_t prefix_bits) {
  address_key key = truncate_key(make_key(address, bytes), prefix_bits);
  uint32_t family = bytes == 16;
  allowed_node **slot = &table->roots[family], *parent = NULL;
  while (*slot && (*slot)->prefix_bits <= prefix_bits && common_bits((*slot)->key, key) >= (*slot)->prefix_bits) {
    if ((*slot)->prefix_bits == prefix_bits) {
      give(*slot, owner);
      return 0;
    }
    parent = *slot;
    slot = &parent->child[bit_at(key, parent->prefix_bits)];
  }
  allowed_node *node = new_node(key, prefix_bits, family, parent), *below = *slot;
  if (!node) return -1;
  uint32_t shared = below ? common_bits(below->key, key) : 128;
  if (below && shared < prefix_bits) {
    allowed_node *fork = new_node(key, shared, family, parent);
    if (!fork) {
      free(node);
      return -1;
    }
    adopt(fork, node);
    adopt(fork, below);
    *slot = fork;
  } else {
    if (below) adopt(node, below);
    *slot = node;
  }
  give(node, owner);
  return 0;
}

/* Removes nodes that neither own nor fork, upwards. */
static void prune(allowed_table *table, allowed_node *node) {
  while (node && !node->owner && !(node->child[0] && node->child[1])) {
    allowed_node *parent = node->parent, *child = node->child[0] ? node->child[0] : node->child[1];
    *slot_of(table, node) = child;
    if (child) child->parent = parent;
    free(node);
    node = parent;
  }
}

void allowed_clear(allowed_table *table, allowed_owner *owner) {
  while (owner->first) {
    allowed_node *node = owner->first;
    give(node, NULL);
    prune(table, node);
  }
}

allowed_owner *allowed_find(const allowed_table *table, const uint8_t *address, uint32_t bytes) {
  address_key key = make_key(address, bytes);
  allowed_owner *best = NULL;
  const allowed_node *node = table->roots[bytes == 16];
  while (node && common_bits(node->key, key) >= node->prefix_bits) {
    if (node->owner) best = node->owner;
    if (node->prefix_bits == bytes * 8) break;
    node = node->child[bit_at(key, node->prefix_bits)];
  }
  return best;
}

void allowed_free(allowed_table *table) {
  for (int family = 0; family < 2; family++) {
    allowed_node *node = table->roots[family];
    while (node) { /* leaves first, without recursion */
      allowed_node *child = node->child[0] ? node->child[0] : node->child[1];
      if (child) {
        node = child;
        continue;
      }
      allowed_node *parent = node->parent;
      if (parent) parent->child[parent->child[1] == node] = NULL;
      give(node, NULL);
      free(node);
      node = parent;
    }
    table->roots[family] = NULL;
  }
}

/* The batch kernel for any 64-bit little-endian machine: four lanes in compiler vectors. */
#include <stdint.h>

typedef uint32_t lanes4 __attribute__((vector_size(16), may_alias));

#define KERNEL_RUN aead_run_portable
#define TARGET
#define LANES 4
#define LANE_T lanes4
#define ROTATE(x, n) ((x) << (n) | (x) >> (32 - (n)))
#define ROT16(x) ROTATE(x, 16)
#define ROT12(x) ROTATE(x, 12)
#define ROT8(x) ROTATE(x, 8)
#define ROT7(x) ROTATE(x, 7)
#define POLY POLY_BLOCK

#include "aead_kernel.h"

/* The layout of the prefix index and of the index of held blocks (`shm.prefix_index` has the terms). */
#ifndef EPP_KERNELS_INDEX_H
#define EPP_KERNELS_INDEX_H

#include "arrays.h"

#define WAYS 8
#define NEAR_WAYS (2 * WAYS)
#define OWNERS (1 << 16)
#define SAME_TAG ((uint64_t)OWNERS) /* x ^ y is below this if and only if the tags are equal */
#define FAR_BUCKETS 32
#define FAR_MARK 1

#define FAR_BUCKET(owner) ((owner) * 0x9E37ULL >> 11 & (FAR_BUCKETS - 1)) /* spreads ids that differ by the same step, too */
#define WIDE_BLOCKS 4
#define BLOCKS(entry) ((entry) >> 16 & 1 ? WIDE_BLOCKS : 1)
#define OWNER(entry) ((entry) & (OWNERS - 1))

/* Reads an entry once, as one word, because another process writes the entries. */
static inline uint64_t load(const uint64_t *entry) { return __atomic_load_n(entry, __ATOMIC_RELAXED); }

static inline uint64_t scaled(uint64_t half, uint64_t buckets) { return half * buckets >> 32; }

#endif

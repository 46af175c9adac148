/* Stores and removes links (`shm.link_table` has the layout and the terms), one after the other. */
#include "arrays.h"
#include <string.h>

#define WAYS 8
#define OWNERS (1 << 16)
#define OWNER_BITS 16
#define COUNT_BITS 8
#define COUNT_MAX ((1 << COUNT_BITS) - 1)
#define TIERS 6
#define OWNER_LIVE 1
#define SPREAD 0x9E3779B97F4A7C15ULL
#define OWNER_SPREAD 0xD6E8FEB86659FD93ULL
#define NONE (-1)
#define AHEAD 4 /* prefetch distance in blocks */

/* The result for one block. REFUSED: no room, or no copy was counted. REPEATED: one copy more or less, and others remain. CHANGED: the
   first copy came, or the last one went. */
enum { REFUSED = 0, REPEATED = 1, CHANGED = 2 };

typedef struct {
    uint64_t *keys, *links, *metas, buckets, owner;
    const uint8_t *live;
    int shift;        /* the lowest bit of the tier's count in a meta word */
    Py_ssize_t added; /* entries added, less entries removed */
} Table;

static inline uint64_t mixed(const Table *table, uint64_t hash) {
    uint64_t key = (hash ^ table->owner * OWNER_SPREAD) * SPREAD;
    key ^= key >> 32;
    return key ? key : 1;
}

static inline uint64_t first_place(const Table *table, uint64_t key) { return ((key & 0xFFFFFFFF) * table->buckets >> 32) * WAYS; }

static inline uint64_t second_place(const Table *table, uint64_t key) { return ((key >> 32) * table->buckets >> 32) * WAYS; }

/* Returns the place of the entry with this key, if it belongs to the table's current owner; otherwise NONE. A bucket has a key twice only
   if keys of two owners are equal by chance; then only the first one is found. */
static int64_t find(const Table *table, uint64_t key) {
    const uint64_t first[2] = {first_place(table, key), second_place(table, key)};
    for (int bucket = 0; bucket < 2; bucket++)
        for (int way = 0; way < WAYS; way++) {
            uint64_t place = first[bucket] + way;
            if (table->keys[place] != key) continue;
            if ((table->metas[place] & (OWNERS - 1)) == table->owner) return place;
            break;
        }
    return NONE;
}

/* Returns the number of empty places of a bucket. `at` becomes the first of them. */
static int empty_places(const Table *table, uint64_t first, int64_t *at) {
    int found = 0;
    for (int way = WAYS - 1; way >= 0; way--)
        if (table->keys[first + way] == 0) {
            *at = first + way;
            found++;
        }
    return found;
}

/* Moves a key out of one of two full buckets to that key's other bucket. Returns the place that became empty, or NONE. */
static int64_t moved(Table *table, const uint64_t *first) {
    for (int bucket = 0; bucket < 2; bucket++)
        for (int way = 0; way < WAYS; way++) {
            uint64_t place = first[bucket] + way, key = table->keys[place], other = first_place(table, key);
            int64_t to;
            if (other == first[bucket]) other = second_place(table, key);
            if (!empty_places(table, other, &to)) continue;
            table->links[to] = table->links[place];
            table->metas[to] = table->metas[place];
            table->keys[to] = key;
            table->keys[place] = 0;
            return place;
        }
    return NONE;
}

/* Returns a place for a new key in one of its two buckets, or NONE: an empty place of the emptier bucket or, if both are full, the place of
   an entry whose owner is not live, or a place that `moved` frees. */
static int64_t room(Table *table, uint64_t key) {
    const uint64_t first[2] = {first_place(table, key), second_place(table, key)};
    int64_t at[2];
    int empty[2] = {empty_places(table, first[0], at), empty_places(table, first[1], at + 1)};
    if (empty[0] || empty[1]) return at[empty[1] > empty[0]];
    for (int bucket = 0; bucket < 2; bucket++)
        for (int way = 0; way < WAYS; way++)
            if (table->live[table->metas[first[bucket] + way] & (OWNERS - 1)] != OWNER_LIVE) return first[bucket] + way;
    return moved(table, first);
}

static int store(Table *table, uint64_t hash, uint64_t link) {
    uint64_t key = mixed(table, hash), one = (uint64_t)1 << table->shift;
    int64_t place = find(table, key);
    if (place == NONE) {
        if ((place = room(table, key)) == NONE) return REFUSED;
        table->added += table->keys[place] == 0;
        table->metas[place] = table->owner | one;
        table->links[place] = link;
        table->keys[place] = key;
        return CHANGED;
    }
    uint64_t held = table->metas[place] >> table->shift & COUNT_MAX;
    if (held < COUNT_MAX) table->metas[place] += one;
    table->links[place] = link;
    return held ? REPEATED : CHANGED;
}

static int drop(Table *table, uint64_t hash, uint64_t *link) {
    int64_t place = find(table, mixed(table, hash));
    uint64_t held = place == NONE ? 0 : table->metas[place] >> table->shift & COUNT_MAX;
    if (!held) return REFUSED;
    table->metas[place] -= (uint64_t)1 << table->shift;
    if (!(table->metas[place] >> OWNER_BITS)) {
        table->keys[place] = 0;
        table->added--;
    }
    *link = table->links[place];
    return held == 1 ? CHANGED : REPEATED;
}

/* Takes the arguments that both kernels have: table, live, hashes, owner, tier. Returns the hashes, or NULL with an exception. */
static PyArrayObject *opened(Table *table, PyObject *const *args, const char *name) {
    PyArrayObject *words = in_place(args[0], NPY_UINT64, 2, 1, name), *live = in_place(args[1], NPY_UINT8, 1, 0, name);
    if (words == NULL || live == NULL) return NULL;
    long owner = PyLong_AsLong(args[3]), tier = PyLong_AsLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    npy_intp size = PyArray_DIM(words, 1);
    if (PyArray_DIM(words, 0) != 3 || size == 0 || size % WAYS || PyArray_SIZE(live) != OWNERS || owner < 0 || owner >= OWNERS ||
        tier < 0 || tier >= TIERS)
        return (PyArrayObject *)PyErr_Format(PyExc_ValueError, "%s: the arrays are not those of one table of links", name);
    uint64_t *data = DATA(uint64_t, words);
    *table = (Table){.keys = data, .links = data + size, .metas = data + 2 * size, .buckets = size / WAYS, .owner = owner,
                     .live = DATA(uint8_t, live), .shift = OWNER_BITS + COUNT_BITS * (int)tier};
    return input(args[2], NPY_UINT64);
}

static inline void fetch(const Table *table, const uint64_t *hashes, npy_intp at, npy_intp size) {
    if (at >= size) return;
    uint64_t key = mixed(table, hashes[at]);
    __builtin_prefetch(table->keys + first_place(table, key));
    __builtin_prefetch(table->keys + second_place(table, key));
}

/* Returns an array with the first `found` values of `array`, and releases `array` unless it is returned itself. */
static PyArrayObject *shortened(PyArrayObject *array, npy_intp found) {
    if (found == PyArray_SIZE(array)) return array;
    PyArrayObject *copy = output(found, NPY_UINT64);
    if (copy != NULL) memcpy(PyArray_DATA(copy), PyArray_DATA(array), found * sizeof(uint64_t));
    Py_DECREF(array);
    return copy;
}

/* store_links(table, live, hashes, owner, tier, links): counts one more copy of each block. Returns the links of the blocks that the tier
   did not hold before, how many blocks found no room, and how many entries were added. `table`: uint64, shape (3, entries); the rows are
   keys, links and metas. */
KERNEL(store_links) {
    if (!arguments("store_links", count, 6)) return NULL;
    Table table;
    PyArrayObject *hashes = opened(&table, args, "store_links"), *links = NULL, *changed = NULL;
    if (hashes == NULL) return NULL;
    npy_intp size = PyArray_SIZE(hashes), outcomes[3] = {0, 0, 0};
    if ((links = input(args[5], NPY_UINT64)) == NULL) goto end;
    if (PyArray_SIZE(links) != size) {
        PyErr_SetString(PyExc_ValueError, "store_links: hashes and links differ in length");
        goto end;
    }
    if ((changed = output(size, NPY_UINT64)) == NULL) goto end;
    for (npy_intp i = 0; i < size; i++) {
        fetch(&table, DATA(uint64_t, hashes), i + AHEAD, size);
        uint64_t link = DATA(uint64_t, links)[i];
        int outcome = store(&table, DATA(uint64_t, hashes)[i], link);
        if (outcome == CHANGED) DATA(uint64_t, changed)[outcomes[CHANGED]] = link;
        outcomes[outcome]++;
    }
    changed = shortened(changed, outcomes[CHANGED]);
end:
    Py_DECREF(hashes);
    Py_XDECREF(links);
    return changed == NULL ? NULL : Py_BuildValue("Nnn", changed, outcomes[REFUSED], table.added);
}

/* remove_links(table, live, hashes, owner, tier): counts one copy less of each block. Returns the links of the blocks that the tier does
   not hold any more, how many blocks it still holds, how many blocks had no copy counted, and how many entries were removed. */
KERNEL(remove_links) {
    if (!arguments("remove_links", count, 5)) return NULL;
    Table table;
    PyArrayObject *hashes = opened(&table, args, "remove_links");
    if (hashes == NULL) return NULL;
    npy_intp size = PyArray_SIZE(hashes), outcomes[3] = {0, 0, 0};
    PyArrayObject *changed = output(size, NPY_UINT64);
    if (changed != NULL) {
        for (npy_intp i = 0; i < size; i++) {
            fetch(&table, DATA(uint64_t, hashes), i + AHEAD, size);
            uint64_t link = 0;
            int outcome = drop(&table, DATA(uint64_t, hashes)[i], &link);
            if (outcome == CHANGED) DATA(uint64_t, changed)[outcomes[CHANGED]] = link;
            outcomes[outcome]++;
        }
        changed = shortened(changed, outcomes[CHANGED]);
    }
    Py_DECREF(hashes);
    return changed == NULL ? NULL : Py_BuildValue("Nnnn", changed, outcomes[REPEATED], outcomes[REFUSED], -table.added);
}

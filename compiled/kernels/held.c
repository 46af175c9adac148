/* Looks up held blocks (`shm.held_blocks`), one after the other, up to the first block at which no row continues without a gap. */
#include "index.h"
#include <string.h>

#define AHEAD 8 /* the buckets of a block are fetched so many blocks earlier */

/* The state of one look-up. `best[row]`: the best weight found so far at which the row holds the current block; 0: none.
   `seen`: the rows whose `best` is not 0. */
typedef struct {
    const uint64_t *entries;
    uint64_t buckets;
    const int64_t *row_of;
    const int32_t *weight_of;
    int64_t rows, *blocks, *weighted, *seen, seen_count;
    int32_t *best;
} Held;

static inline const uint64_t *near_bucket(const Held *held, uint64_t half) {
    return held->entries + WAYS * scaled(half, held->buckets);
}

static inline void owned(Held *held, uint64_t owner) {
    int64_t row = held->row_of[owner];
    int32_t weight = held->weight_of[owner];
    if (row < 0 || row >= held->rows || weight <= held->best[row]) return;
    if (held->best[row] == 0) held->seen[held->seen_count++] = row;
    held->best[row] = weight;
}

static void find_owners(Held *held, uint64_t hash) {
    const uint64_t *near[2] = {near_bucket(held, hash & 0xFFFFFFFF), near_bucket(held, hash >> 32)};
    int far = 0;
    for (int way = 0; way < NEAR_WAYS; way++) {
        uint64_t entry = load(near[way >> 3] + (way & 7));
        if ((entry ^ hash) >= SAME_TAG) continue;
        if (OWNER(entry) == FAR_MARK) far = 1;
        else owned(held, OWNER(entry));
    }
    if (!far) return;
    const uint64_t *first = held->entries + WAYS * scaled(hash >> 16 & 0xFFFFFFFF, held->buckets - FAR_BUCKETS + 1);
    for (int at = 0; at < FAR_BUCKETS * WAYS; at++) {
        uint64_t entry = load(first + at);
        if ((entry ^ hash) < SAME_TAG) owned(held, OWNER(entry));
    }
}

static void count_blocks(Held *held, const uint64_t *hashes, npy_intp count) {
    for (npy_intp block = 0; block < count; block++) {
        if (block + AHEAD < count) {
            __builtin_prefetch(near_bucket(held, hashes[block + AHEAD] & 0xFFFFFFFF));
            __builtin_prefetch(near_bucket(held, hashes[block + AHEAD] >> 32));
        }
        held->seen_count = 0;
        find_owners(held, hashes[block]);
        int further = 0;
        for (int64_t i = 0; i < held->seen_count; i++) {
            int64_t row = held->seen[i];
            if (held->blocks[row] == block) {
                held->blocks[row]++;
                held->weighted[row] += held->best[row];
                further = 1;
            }
            held->best[row] = 0;
        }
        if (!further) return;
    }
}

static PyObject *numbers(const int64_t *values, int64_t count) {
    PyObject *list = PyList_New(count);
    for (int64_t i = 0; list != NULL && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, value);
    }
    return list;
}

/* held(entries, hashes, row_of, weight_of, rows): returns two lists with a number per row: how many leading blocks the row holds without
   a gap, and the sum of their best weights. `entries`: uint64, shape (buckets, 8). `row_of`, `weight_of`: one element per owner id; an
   owner whose row is outside 0 ... rows - 1 is ignored. */
KERNEL(held) {
    if (!arguments("held", count, 5)) return NULL;
    PyArrayObject *table = in_place(args[0], NPY_UINT64, 2, 0, "held: entries"),
                  *row_of = in_place(args[2], NPY_INT64, 1, 0, "held: row_of"),
                  *weight_of = in_place(args[3], NPY_INT32, 1, 0, "held: weight_of");
    if (table == NULL || row_of == NULL || weight_of == NULL) return NULL;
    int64_t rows = PyLong_AsLongLong(args[4]);
    if (rows == -1 && PyErr_Occurred()) return NULL;
    if (PyArray_DIM(table, 1) != WAYS || PyArray_DIM(table, 0) < FAR_BUCKETS || PyArray_SIZE(row_of) != OWNERS ||
        PyArray_SIZE(weight_of) != OWNERS || rows < 0 || rows > OWNERS)
        return PyErr_Format(PyExc_ValueError, "held: the arrays are not those of one index");
    PyArrayObject *hashes = input(args[1], NPY_UINT64);
    if (hashes == NULL) return NULL;
    int64_t *memory = PyMem_Calloc(4 * rows + 1, sizeof(int64_t));
    PyObject *found = NULL;
    if (memory == NULL) {
        PyErr_NoMemory();
    } else {
        Held held = {.entries = DATA(uint64_t, table), .buckets = PyArray_DIM(table, 0), .row_of = DATA(int64_t, row_of),
                     .weight_of = DATA(int32_t, weight_of), .rows = rows, .blocks = memory, .weighted = memory + rows,
                     .seen = memory + 2 * rows, .best = (int32_t *)(memory + 3 * rows)};
        count_blocks(&held, DATA(uint64_t, hashes), PyArray_SIZE(hashes));
        PyObject *blocks = numbers(held.blocks, rows), *weighted = numbers(held.weighted, rows);
        if (blocks != NULL && weighted != NULL) found = PyTuple_Pack(2, blocks, weighted);
        Py_XDECREF(blocks);
        Py_XDECREF(weighted);
        PyMem_Free(memory);
    }
    Py_DECREF(hashes);
    return found;
}

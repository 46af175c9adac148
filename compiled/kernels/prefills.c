/* Shows prefills to other workers, and finds them (`shm.prefills` has the layout of a row and the order of its stores). */
#include "arrays.h"

enum { SINCE, OWNER, KNOWN, TOKENS, BLOCKS, LAST, MARKS }; /* words of a record; the hashes of the marked blocks begin at MARKS */
#define MARKED_MAX 64

typedef struct {
    PyArrayObject *rows;
    npy_intp workers, width, places, record; /* `record`: words of one record */
    const int64_t *marked;                   /* numbers of the marked blocks, ascending, counted from 1 */
    npy_intp marked_count;
} Prefills;

/* Checks the rows (uint64, shape (workers, words)), their number of places, and the numbers of the marked blocks (int64). */
static int prefills(Prefills *all, PyObject *rows, PyObject *places, PyObject *marked, int written, const char *name) {
    PyArrayObject *numbers = in_place(marked, NPY_INT64, 1, 0, name);
    all->rows = in_place(rows, NPY_UINT64, 2, written, name);
    if (numbers == NULL || all->rows == NULL) return 0;
    all->places = PyLong_AsSsize_t(places);
    if (all->places == -1 && PyErr_Occurred()) return 0;
    all->workers = PyArray_DIM(all->rows, 0);
    all->width = PyArray_DIM(all->rows, 1);
    all->marked = DATA(int64_t, numbers);
    all->marked_count = PyArray_SIZE(numbers);
    all->record = MARKS + all->marked_count;
    if (all->marked_count <= MARKED_MAX && all->places >= 0 && all->places <= all->width / (1 + all->record)) return 1;
    PyErr_Format(PyExc_ValueError, "%s: a row of %zd words has no %zd places with %zd marks", name, all->width, all->places,
                 all->marked_count);
    return 0;
}

static npy_intp marks_up_to(const Prefills *all, uint64_t blocks) {
    npy_intp marks = 0;
    while (marks < all->marked_count && (uint64_t)all->marked[marks] <= blocks) marks++;
    return marks;
}

/* show_prefill(rows, places, marked, worker, place, hashes, owner, known, tokens, now): writes a record and then its key. Returns whether
   the prefill has a marked block that the endpoint does not hold; if not, writes nothing. */
KERNEL(show_prefill) {
    Prefills all;
    if (!arguments("show_prefill", count, 10) || !prefills(&all, args[0], args[1], args[2], 1, "show_prefill")) return NULL;
    Py_ssize_t worker = PyLong_AsSsize_t(args[3]), place = PyLong_AsSsize_t(args[4]);
    unsigned long long owner = PyLong_AsUnsignedLongLong(args[6]), known = PyLong_AsUnsignedLongLong(args[7]);
    double tokens = PyFloat_AsDouble(args[8]), now = PyFloat_AsDouble(args[9]);
    if (PyErr_Occurred()) return NULL;
    if (worker < 0 || worker >= all.workers || place < 0 || place >= all.places)
        return PyErr_Format(PyExc_IndexError, "show_prefill: there is no place %zd of worker %zd", place, worker);
    PyArrayObject *chain = input(args[5], NPY_UINT64);
    if (chain == NULL) return NULL;
    npy_intp blocks = PyArray_SIZE(chain), marks = marks_up_to(&all, blocks), first = marks_up_to(&all, known);
    if (first < marks) {
        const uint64_t *hashes = DATA(uint64_t, chain);
        uint64_t *keys = DATA(uint64_t, all.rows) + worker * all.width, *record = keys + all.places + place * all.record;
        __atomic_thread_fence(__ATOMIC_RELEASE); /* the key is cleared before the record changes */
        for (npy_intp i = 0; i < marks; i++) record[MARKS + i] = hashes[all.marked[i] - 1];
        memcpy(record + SINCE, &now, sizeof(now));
        memcpy(record + TOKENS, &tokens, sizeof(tokens));
        record[OWNER] = owner;
        record[KNOWN] = known;
        record[BLOCKS] = blocks;
        record[LAST] = hashes[blocks - 1];
        __atomic_store_n(keys + place, record[MARKS + first], __ATOMIC_RELEASE);
    }
    Py_DECREF(chain);
    return PyBool_FromLong(first < marks);
}

/* Returns how many leading blocks a record and a chain of `count` hashes are known to share. */
static npy_intp shared(const Prefills *all, const uint64_t *record, const uint64_t *hashes, npy_intp count) {
    uint64_t blocks = record[BLOCKS];
    if (blocks && blocks <= (uint64_t)count && hashes[blocks - 1] == record[LAST]) return (npy_intp)blocks;
    npy_intp marks = marks_up_to(all, blocks < (uint64_t)count ? blocks : (uint64_t)count), same = 0;
    for (npy_intp i = 0; i < marks; i++) same += record[MARKS + i] == hashes[all->marked[i] - 1];
    return same ? all->marked[same - 1] : 0;
}

static int is_mark(const Prefills *all, uint64_t key, const uint64_t *hashes, npy_intp marks) {
    for (npy_intp i = 0; i < marks; i++)
        if (hashes[all->marked[i] - 1] == key) return 1;
    return 0;
}

/* Copies the record of one place. Returns 0 if it has changed meanwhile. */
static int copied(const Prefills *all, const uint64_t *keys, npy_intp place, uint64_t key, uint64_t *copy) {
    const uint64_t *record = keys + all->places + place * all->record;
    for (npy_intp i = 0; i < all->record; i++) copy[i] = __atomic_load_n(record + i, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(keys + place, __ATOMIC_RELAXED) == key && __atomic_load_n(record + SINCE, __ATOMIC_RELAXED) == copy[SINCE];
}

/* prefills_under_way(rows, places, marked, hashes, now, old, most): returns a list of (owner, leading blocks in common, since, tokens), of
   at most `most` prefills that have begun less than `old` seconds before `now` and compute leading blocks of the chain `hashes`. */
KERNEL(prefills_under_way) {
    Prefills all;
    if (!arguments("prefills_under_way", count, 7) || !prefills(&all, args[0], args[1], args[2], 0, "prefills_under_way")) return NULL;
    double now = PyFloat_AsDouble(args[4]), old = PyFloat_AsDouble(args[5]);
    Py_ssize_t most = PyLong_AsSsize_t(args[6]);
    if (PyErr_Occurred()) return NULL;
    PyArrayObject *chain = input(args[3], NPY_UINT64);
    if (chain == NULL) return NULL;
    const uint64_t *hashes = DATA(uint64_t, chain);
    npy_intp blocks = PyArray_SIZE(chain), marks = marks_up_to(&all, blocks);
    PyObject *found = PyList_New(0);
    for (npy_intp worker = 0; marks && worker < all.workers; worker++) {
        const uint64_t *keys = DATA(uint64_t, all.rows) + worker * all.width;
        for (npy_intp place = 0; found != NULL && place < all.places && PyList_GET_SIZE(found) < most; place++) {
            uint64_t copy[MARKS + MARKED_MAX], key = __atomic_load_n(keys + place, __ATOMIC_ACQUIRE);
            if (!key || !is_mark(&all, key, hashes, marks) || !copied(&all, keys, place, key, copy)) continue;
            npy_intp common = shared(&all, copy, hashes, blocks);
            double since, tokens;
            memcpy(&since, copy + SINCE, sizeof(since));
            memcpy(&tokens, copy + TOKENS, sizeof(tokens));
            if (!(now - since < old) || (uint64_t)common <= copy[KNOWN]) continue;
            PyObject *prefill = Py_BuildValue("Kndd", (unsigned long long)copy[OWNER], common, since, tokens);
            if (prefill == NULL || PyList_Append(found, prefill) < 0) Py_CLEAR(found);
            Py_XDECREF(prefill);
        }
    }
    Py_DECREF(chain);
    return found;
}

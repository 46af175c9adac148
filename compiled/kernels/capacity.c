/* Lists and removes the oldest entries of owners that exceed their capacity (`shm.index_capacity` has the terms). */
#include "index.h"

/* Owner -> 1 + where its next key goes; 0 for owners that are not listed. Static because it is large; Python's lock guards it. */
static npy_intp next_key[OWNERS];

/* Reads a list of owners in ascending order. Returns 1, or 0 with an exception. */
static int owners_in(PyObject *list, npy_intp *owners) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        owners[i] = PyLong_AsSsize_t(PyList_GET_ITEM(list, i));
        if (PyErr_Occurred()) return 0;
        if (owners[i] < (i ? owners[i - 1] + 1 : 0) || owners[i] >= OWNERS) {
            PyErr_Format(PyExc_ValueError, "owned: %zd is not a larger owner than the one before it, or none at all", owners[i]);
            return 0;
        }
    }
    return 1;
}

typedef struct {
    uint64_t key;
    uint16_t owner;
} Found;

/* Writes the entries of the owners that have a `next_key` to `found`, and counts those of each owner there. Returns how many there are. */
static npy_intp scan(const uint64_t *entries, const uint32_t *ages, npy_intp size, uint32_t newest, Found *found) {
    npy_intp count = 0;
    for (npy_intp place = 0; place < size; place++) { /* without branches: which entries are wanted cannot be predicted */
        uint16_t owner = OWNER(entries[place]);
        uint32_t age = ages[place] - (newest + 1); /* makes the newest age the largest, even after the counter has wrapped */
        found[count] = (Found){(uint64_t)age << 32 | (uint64_t)place, owner};
        count += next_key[owner] != 0;
    }
    for (npy_intp i = 0; i < count; i++) next_key[found[i].owner]++;
    return count;
}

/* Returns the keys of all owners, in their order, or NULL with an exception. Writes the end of each owner's keys to `ends`. */
static PyArrayObject *keys_of(const uint64_t *entries, const uint32_t *ages, npy_intp size, const npy_intp *owners, npy_intp given,
                              uint32_t newest, int64_t *ends) {
    Found *found = PyMem_RawMalloc((size + 1) * sizeof(Found)); /* what is not written takes no memory */
    if (found == NULL) return (PyArrayObject *)PyErr_NoMemory();
    for (npy_intp i = 0; i < given; i++) next_key[owners[i]] = 1;
    npy_intp total = scan(entries, ages, size, newest, found), begin = 0;
    for (npy_intp i = 0; i < given; i++) {
        npy_intp own = next_key[owners[i]] - 1;
        next_key[owners[i]] = begin + 1;
        ends[i] = begin += own;
    }
    PyArrayObject *keys = output(total, NPY_UINT64);
    for (npy_intp i = 0; keys != NULL && i < total; i++) DATA(uint64_t, keys)[next_key[found[i].owner]++ - 1] = found[i].key;
    for (npy_intp i = 0; i < given; i++) next_key[owners[i]] = 0;
    PyMem_RawFree(found);
    return keys;
}

/* owned(entries, ages, owners, newest): finds the entries of some owners. `owners`: a list in ascending order. Returns the keys of all
   (uint64, those of the first owner first), and where the keys of each owner end (int64). A key is the age of an entry, relative to
   `newest` so that older entries have smaller keys, times 2^32, plus its place. The keys of one owner are not sorted. */
KERNEL(owned) {
    if (!arguments("owned", count, 4)) return NULL;
    PyArrayObject *table = in_place(args[0], NPY_UINT64, 1, 0, "owned: entries"), *ages = in_place(args[1], NPY_UINT32, 1, 0, "owned: ages");
    if (table == NULL || ages == NULL) return NULL;
    npy_intp size = PyArray_SIZE(table);
    if (PyArray_SIZE(ages) != size || size > UINT32_MAX || !PyList_Check(args[2]))
        return PyErr_Format(PyExc_ValueError, "owned: the arrays are not those of one index, or the owners are not a list");
    uint32_t newest = (uint32_t)PyLong_AsUnsignedLongLongMask(args[3]);
    npy_intp given = PyList_GET_SIZE(args[2]), *owners = PyErr_Occurred() ? NULL : PyMem_New(npy_intp, given + 1);
    PyArrayObject *ends = owners == NULL ? NULL : output(given, NPY_INT64), *keys = NULL;
    if (ends != NULL && owners_in(args[2], owners))
        keys = keys_of(DATA(uint64_t, table), DATA(uint32_t, ages), size, owners, given, newest, DATA(int64_t, ends));
    if (owners == NULL && !PyErr_Occurred()) PyErr_NoMemory();
    PyMem_Free(owners);
    if (keys != NULL) return Py_BuildValue("NN", keys, ends);
    Py_XDECREF(ends);
    return NULL;
}

/* free_oldest(entries, ages, held, places, first, before, owner, excess): frees entries of an owner until it holds `excess` blocks fewer.
   `places`: where a scan found its entries (uint32). The function goes through them from index `first` on, and leaves out entries that
   have another owner now, and those that were last inserted or refreshed at the age `before` or later. Returns how many entries were
   freed, and the index of the next place. */
KERNEL(free_oldest) {
    if (!arguments("free_oldest", count, 8)) return NULL;
    PyArrayObject *table = in_place(args[0], NPY_UINT64, 1, 1, "free_oldest: entries"),
                  *ages = in_place(args[1], NPY_UINT32, 1, 0, "free_oldest: ages"),
                  *held = in_place(args[2], NPY_INT64, 1, 1, "free_oldest: held"),
                  *places = in_place(args[3], NPY_UINT32, 1, 0, "free_oldest: places");
    if (table == NULL || ages == NULL || held == NULL || places == NULL) return NULL;
    if (PyArray_SIZE(ages) != PyArray_SIZE(table) || PyArray_SIZE(held) != OWNERS)
        return PyErr_Format(PyExc_ValueError, "free_oldest: the arrays are not those of one index");
    npy_intp at = PyLong_AsSsize_t(args[4]), size = PyArray_SIZE(places), freed = 0;
    uint32_t before = (uint32_t)PyLong_AsUnsignedLongLongMask(args[5]);
    uint64_t owner = PyLong_AsUnsignedLongMask(args[6]) & (OWNERS - 1);
    int64_t excess = PyLong_AsLongLong(args[7]);
    if (PyErr_Occurred()) return NULL;
    for (; excess > 0 && at >= 0 && at < size; at++) {
        uint32_t place = DATA(uint32_t, places)[at];
        if (place >= PyArray_SIZE(table)) return PyErr_Format(PyExc_ValueError, "free_oldest: there is no place %u", place);
        uint64_t *entry = DATA(uint64_t, table) + place;
        if (*entry == 0 || OWNER(*entry) != owner || (int32_t)(DATA(uint32_t, ages)[place] - before) >= 0) continue;
        DATA(int64_t, held)[owner] -= BLOCKS(*entry);
        excess -= BLOCKS(*entry);
        __atomic_store_n(entry, 0, __ATOMIC_RELAXED);
        freed++;
    }
    return Py_BuildValue("nn", freed, at);
}

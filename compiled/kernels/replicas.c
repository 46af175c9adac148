/* Reads what the replica store sends (`workers.replicas` has the protocol and the messages). */
#include "arrays.h"

#define HEAD ">3\r\n$7\r\nmessage\r\n$"
#define HEAD_BYTES ((Py_ssize_t)sizeof(HEAD) - 1)
#define SIZE_DIGITS 10
#define NUMBER_DIGITS 18 /* always fit into 64 bits */
#define ROW_BYTES 20     /* key u64, requests u32, tokens u64 */

/* Reads up to `digits` digits and the end of the line. Returns where the next line begins, or -1 if there is something else. */
static Py_ssize_t number(const char *data, Py_ssize_t at, Py_ssize_t end, int digits, int64_t *value) {
    Py_ssize_t first = at;
    for (*value = 0; at < end && at - first < digits && data[at] >= '0' && data[at] <= '9'; at++) *value = 10 * *value + (data[at] - '0');
    return at > first && at + 2 <= end && data[at] == '\r' && data[at + 1] == '\n' ? at + 2 : -1;
}

/* Finds the text of at most `most` bytes whose size begins at `at`. Returns where the next line begins, or -1. */
static Py_ssize_t text(const char *data, Py_ssize_t at, Py_ssize_t end, int64_t most, Py_ssize_t *begin, Py_ssize_t *size) {
    int64_t bytes;
    *begin = number(data, at, end, SIZE_DIGITS, &bytes);
    if (*begin < 0 || bytes > most || bytes + 2 > end - *begin) return -1;
    *size = bytes;
    return *begin + bytes + 2;
}

/* Reads one message of a channel, or one number of an answer. Returns it and moves `at` behind it; or returns NULL, without an exception
   if something else begins there or is not complete. */
static PyObject *answer(const char *data, Py_ssize_t *at, Py_ssize_t end, int64_t most) {
    int64_t value;
    Py_ssize_t next, channel, channel_size, content, content_size;
    if (*at < end && data[*at] == ':') {
        if ((next = number(data, *at + 1, end, NUMBER_DIGITS, &value)) < 0) return NULL;
        *at = next;
        return PyLong_FromLongLong(value);
    }
    if (end - *at < HEAD_BYTES || memcmp(data + *at, HEAD, HEAD_BYTES) != 0) return NULL;
    next = text(data, *at + HEAD_BYTES, end, most, &channel, &channel_size);
    if (next < 0 || next >= end || data[next] != '$') return NULL;
    next = text(data, next + 1, end, most, &content, &content_size);
    if (next < 0) return NULL;
    *at = next;
    return Py_BuildValue("y#y#", data + channel, channel_size, data + content, content_size);
}

/* answers(data, at, most): returns a list of what stands from `at` on, and where it ends. Messages of channels are pairs of channel and
   content, numbers are integers. Stops before what is not complete, is neither of both, or has a part of more than `most` bytes. */
KERNEL(answers) {
    if (!arguments("answers", count, 3)) return NULL;
    char *data;
    Py_ssize_t size, at = PyLong_AsSsize_t(args[1]);
    int64_t most = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[0], &data, &size) < 0) return NULL;
    if (at < 0 || at > size) return PyErr_Format(PyExc_ValueError, "answers: %zd is outside %zd bytes", at, size);
    PyObject *found = PyList_New(0), *value;
    while (found != NULL && (value = answer(data, &at, size, most)) != NULL) {
        if (PyList_Append(found, value) < 0) Py_CLEAR(found);
        Py_DECREF(value);
    }
    if (found == NULL || PyErr_Occurred()) {
        Py_XDECREF(found);
        return NULL;
    }
    return Py_BuildValue("Nn", found, at);
}

/* Reads requests and tokens of a key. Returns 1 if the dict has it, 0 if not (both are 0 then), or -1 with an exception. */
static int load_of(PyObject *loads, PyObject *key, int64_t *load) {
    PyObject *pair = PyDict_GetItemWithError(loads, key);
    load[0] = load[1] = 0;
    if (pair == NULL) return PyErr_Occurred() ? -1 : 0;
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "merge_loads: a load is a pair of numbers");
        return -1;
    }
    for (int part = 0; part < 2; part++) load[part] = PyLong_AsLongLong(PyTuple_GET_ITEM(pair, part));
    return PyErr_Occurred() ? -1 : 1;
}

/* Sets requests and tokens of a key, or removes the key if both are 0. Returns 0, or -1 with an exception. */
static int set_load(PyObject *loads, PyObject *key, int present, const int64_t *load) {
    if (load[0] == 0 && load[1] == 0) return present ? PyDict_DelItem(loads, key) : 0;
    PyObject *requests = PyLong_FromLongLong(load[0]), *tokens = PyLong_FromLongLong(load[1]);
    PyObject *pair = requests == NULL || tokens == NULL ? NULL : PyTuple_Pack(2, requests, tokens);
    int failed = pair == NULL ? -1 : PyDict_SetItem(loads, key, pair);
    Py_XDECREF(requests);
    Py_XDECREF(tokens);
    Py_XDECREF(pair);
    return failed;
}

/* Merges the load of one endpoint. Returns 0, or -1 with an exception. */
static int merge_load(PyObject *loads, PyObject *totals, PyObject *changed, PyObject *key, const int64_t *load, Py_ssize_t rows_max) {
    int64_t before[2], total[2];
    int known = load_of(loads, key, before);
    if (known < 0) return -1;
    if ((before[0] == load[0] && before[1] == load[1]) || (!known && PyDict_GET_SIZE(loads) >= rows_max)) return 0;
    int present = load_of(totals, key, total);
    if (present < 0) return -1;
    for (int part = 0; part < 2; part++) total[part] += load[part] - before[part];
    if (set_load(loads, key, known, load) < 0 || set_load(totals, key, present, total) < 0) return -1;
    return PySet_Add(changed, key);
}

/* merge_loads(loads, totals, changed, rows, requests_max, tokens_max, rows_max): takes over what one replica says about some endpoints.
   `loads` and `totals`: dicts: key -> (requests, tokens), of this replica and of all; keys without load are left out. `changed`: a set, to
   which the keys are added whose load differs. `rows`: packed rows. Numbers are lowered to their maximum; beyond `rows_max` keys, a
   replica's load at further endpoints is ignored. */
KERNEL(merge_loads) {
    if (!arguments("merge_loads", count, 7)) return NULL;
    const int64_t most[2] = {PyLong_AsLongLong(args[4]), PyLong_AsLongLong(args[5])};
    Py_ssize_t rows_max = PyLong_AsSsize_t(args[6]), size;
    char *rows;
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[3], &rows, &size) < 0) return NULL;
    if (!PyDict_Check(args[0]) || !PyDict_Check(args[1]) || !PySet_Check(args[2]) || size % ROW_BYTES)
        return PyErr_Format(PyExc_TypeError, "merge_loads: needs two dicts, a set, and rows of %d bytes", ROW_BYTES);
    for (Py_ssize_t at = 0; at < size; at += ROW_BYTES) {
        uint64_t key, tokens;
        uint32_t requests;
        memcpy(&key, rows + at, 8);
        memcpy(&requests, rows + at + 8, 4);
        memcpy(&tokens, rows + at + 12, 8);
        const int64_t load[2] = {requests < most[0] ? requests : most[0], tokens < (uint64_t)most[1] ? (int64_t)tokens : most[1]};
        PyObject *number = PyLong_FromUnsignedLongLong(key);
        int failed = number == NULL ? -1 : merge_load(args[0], args[1], args[2], number, load, rows_max);
        Py_XDECREF(number);
        if (failed < 0) return NULL;
    }
    Py_RETURN_NONE;
}

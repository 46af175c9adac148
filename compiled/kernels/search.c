/* Searches bytes. `bytes.find` of Python 3.11 packs its arguments into a tuple and parses them, which costs more than most searches. */
#include "arrays.h"
#include <string.h>

#define AT_ONCE 64 /* bytes: a loop of this length becomes a few instructions on vectors */

typedef unsigned char byte;

static inline byte lower(byte letter) { return letter >= 'A' && letter <= 'Z' ? letter | 32 : letter; }

/* In these functions, `folds` says whether the letters of `data` count as lower case. It is a constant in each caller. */
static inline int same(byte letter, byte wanted, int folds) { return (folds ? lower(letter) : letter) == wanted; }

/* Returns the first of `count` places in `data` at which `text` begins, or -1. */
static Py_ssize_t begins(const byte *data, Py_ssize_t count, const byte *text, Py_ssize_t length, int folds) {
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t equal = 0;
        while (equal < length && same(data[i + equal], text[equal], folds)) equal++;
        if (equal == length) return i;
    }
    return -1;
}

/* Returns the first place of `text` in `data`, or -1. Goes over AT_ONCE places at once: at most of them, the first, the middle and the last
   letter of `text` do not stand at their distances. The last round goes over some places again. */
static inline Py_ssize_t place(const byte *data, Py_ssize_t size, const byte *text, Py_ssize_t length, int folds) {
    Py_ssize_t places = size - length + 1, middle = length / 2;
    if (length == 0 || places < AT_ONCE) return begins(data, places, text, length, folds);
    for (Py_ssize_t at = 0; at < places; at += AT_ONCE) {
        if (at > places - AT_ONCE) at = places - AT_ONCE;
        const byte *a = data + at, *b = a + middle, *c = a + length - 1;
        const byte bit = folds ? 32 : 0; /* a letter has the same value in both cases with this bit set */
        const byte first = text[0] | bit, second = text[middle] | bit, third = text[length - 1] | bit;
        byte may = 0;
        for (int i = 0; i < AT_ONCE; i++) may |= ((a[i] | bit) == first) & ((b[i] | bit) == second) & ((c[i] | bit) == third);
        Py_ssize_t found = may ? begins(a, AT_ONCE, text, length, folds) : -1;
        if (found >= 0) return at + found;
    }
    return -1;
}

/* find(data, needle, start=0, end=len(data)): does what `bytes.find` does, for bytes only. */
KERNEL(find) {
    if (count < 2 || count > 4) return PyErr_Format(PyExc_TypeError, "find takes 2 to 4 arguments, not %zd", count);
    if (!PyBytes_Check(args[0]) || !PyBytes_Check(args[1])) return PyErr_Format(PyExc_TypeError, "find: searches bytes in bytes");
    const char *data = PyBytes_AS_STRING(args[0]);
    Py_ssize_t size = PyBytes_GET_SIZE(args[0]), length = PyBytes_GET_SIZE(args[1]);
    Py_ssize_t start = count > 2 ? PyLong_AsSsize_t(args[2]) : 0, end = count > 3 ? PyLong_AsSsize_t(args[3]) : size;
    if ((start == -1 || end == -1) && PyErr_Occurred()) return NULL;
    if (start < 0) start = start + size < 0 ? 0 : start + size; /* like an index of a slice: from the end */
    if (end < 0) end = end + size < 0 ? 0 : end + size;
    if (end > size) end = size;
    if (start > end) return PyLong_FromLong(-1);
    const byte *text = (const byte *)PyBytes_AS_STRING(args[1]);
    if (length == 1) {
        const char *one = memchr(data + start, text[0], end - start);
        return PyLong_FromSsize_t(one == NULL ? -1 : one - data);
    }
    Py_ssize_t found = place((const byte *)data + start, end - start, text, length, 0);
    return PyLong_FromSsize_t(found < 0 ? -1 : start + found);
}

/* is_uuid(text): whether a str is a UUID as it is usually written: 36 characters, hexadecimal digits in groups of 8, 4, 4, 4 and 12. */
KERNEL(is_uuid) {
    if (!arguments("is_uuid", count, 1)) return NULL;
    if (!PyUnicode_Check(args[0])) return PyErr_Format(PyExc_TypeError, "is_uuid: looks at a str");
    if (!PyUnicode_IS_COMPACT_ASCII(args[0]) || PyUnicode_GET_LENGTH(args[0]) != 36) Py_RETURN_FALSE;
    const byte *text = (const byte *)PyUnicode_1BYTE_DATA(args[0]);
    for (int i = 0; i < 36; i++) {
        byte letter = lower(text[i]);
        int digit = (letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'f');
        int dash = i == 8 || i == 13 || i == 18 || i == 23;
        if (dash ? letter != '-' : !digit) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* header(message, needle, start, end): returns the value of a header in message[start:end] as Latin-1 text; None: it is not there, or not
   encoded as gateways encode it (`epp.protocol.codec.header_map`). `needle`: the bytes before the length of the value. */
KERNEL(header) {
    if (!arguments("header", count, 4)) return NULL;
    if (!PyBytes_Check(args[0]) || !PyBytes_Check(args[1])) return PyErr_Format(PyExc_TypeError, "header: searches bytes in bytes");
    Py_ssize_t start = PyLong_AsSsize_t(args[2]), end = PyLong_AsSsize_t(args[3]), length = PyBytes_GET_SIZE(args[1]);
    if ((start == -1 || end == -1) && PyErr_Occurred()) return NULL;
    Py_ssize_t size = PySlice_AdjustIndices(PyBytes_GET_SIZE(args[0]), &start, &end, 1);
    const byte *data = (const byte *)PyBytes_AS_STRING(args[0]);
    Py_ssize_t found = place(data + start, size, (const byte *)PyBytes_AS_STRING(args[1]), length, 0);
    Py_ssize_t key = start + found, at = key + length;
    if (found < 0 || key < 2 || at >= end) Py_RETURN_NONE;
    /* The length of the entry proves that this is a header: tag, length, key, tag, length, value. */
    if (data[at] > 0x7F || data[at] >= end - at || data[key - 2] != 0x0A || data[key - 1] != length + 1 + data[at]) Py_RETURN_NONE;
    return PyUnicode_DecodeLatin1((const char *)data + at + 1, data[at], NULL);
}

/* Reads a length of at most four bytes, as protobuf writes it. Returns where it ends; NULL: it is longer, or does not end before `end`. */
static inline const byte *past_length(const byte *at, const byte *end, Py_ssize_t *length) {
    *length = 0;
    if (at < end && *at < 0x80) { /* nearly always */
        *length = *at;
        return at + 1;
    }
    for (int shift = 0; at < end && shift < 28; shift += 7) {
        *length |= (Py_ssize_t)(*at & 0x7F) << shift;
        if (*at++ < 0x80) return at;
    }
    return NULL;
}

/* Puts the value at begin...end into `found`, if `names` has its name in lower case. Returns 0 after an exception. */
static int keep_value(PyObject *found, PyObject *names, const byte *name, Py_ssize_t size, const byte *begin, const byte *end) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
        PyObject *wanted = PyTuple_GET_ITEM(names, i);
        if (PyUnicode_GET_LENGTH(wanted) != size || begins(name, 1, PyUnicode_1BYTE_DATA(wanted), size, 1) != 0) continue;
        PyObject *value = PyUnicode_DecodeLatin1((const char *)begin, end - begin, NULL), *before = PyTuple_GET_ITEM(found, i);
        if (value == NULL) return 0;
        PyTuple_SET_ITEM(found, i, value);
        Py_DECREF(before);
    }
    return 1;
}

/* Fills `found` with the values of `names` in the HeaderMap at begin...end. Returns 1; 0: it has another form; -1: exception. */
static int read_values(PyObject *found, PyObject *names, const byte *at, const byte *end) {
    while (at < end) {
        Py_ssize_t length, size;
        if (*at != 0x0A || (at = past_length(at + 1, end, &length)) == NULL || length < 2 || length > end - at) return 0;
        const byte *name = at + 2, *stop = at + length;
        if (at[0] != 0x0A || at[1] > 0x7F || at[1] > length - 2) return 0;
        const byte *value = name + at[1], *begin = value;
        if (value < stop) {
            if (*value != 0x12 && *value != 0x1A) return 0;
            if ((begin = past_length(value + 1, stop, &size)) == NULL || size != stop - begin) return 0;
        }
        if (!keep_value(found, names, name, value - name, begin, stop)) return -1;
        at = stop;
    }
    return 1;
}

/* header_values(message, names, start, end): returns the values of these headers in the HttpHeaders message[start:end], as Latin-1 text: a
   tuple with None for each header that is missing. If a header occurs several times, in whatever case, its last value counts. None: they
   are not encoded as gateways encode them, see `epp.protocol.codec.header_map`. `names`: a tuple of ASCII texts in lower case. */
KERNEL(header_values) {
    if (!arguments("header_values", count, 4)) return NULL;
    PyObject *names = args[1];
    int named = PyBytes_Check(args[0]) && PyTuple_Check(names);
    for (Py_ssize_t i = 0; named && i < PyTuple_GET_SIZE(names); i++)
        named = PyUnicode_Check(PyTuple_GET_ITEM(names, i)) && PyUnicode_IS_COMPACT_ASCII(PyTuple_GET_ITEM(names, i));
    if (!named) return PyErr_Format(PyExc_TypeError, "header_values: finds a tuple of ASCII names in bytes");
    Py_ssize_t start = PyLong_AsSsize_t(args[2]), stop = PyLong_AsSsize_t(args[3]), length;
    if ((start == -1 || stop == -1) && PyErr_Occurred()) return NULL;
    Py_ssize_t size = PySlice_AdjustIndices(PyBytes_GET_SIZE(args[0]), &start, &stop, 1);
    const byte *at = (const byte *)PyBytes_AS_STRING(args[0]) + start, *end = at + size;
    if (size == 0 || *at != 0x0A || (at = past_length(at + 1, end, &length)) == NULL || length > end - at) Py_RETURN_NONE;
    const byte *behind = at + length;
    if (behind != end && !(end - behind == 2 && behind[0] == 0x18 && behind[1] == 1)) Py_RETURN_NONE;
    PyObject *found = PyTuple_New(PyTuple_GET_SIZE(names));
    for (Py_ssize_t i = 0; found != NULL && i < PyTuple_GET_SIZE(names); i++) PyTuple_SET_ITEM(found, i, Py_NewRef(Py_None));
    int state = found == NULL ? -1 : read_values(found, names, at, behind);
    if (state == 1) return found;
    Py_XDECREF(found);
    if (state < 0) return NULL;
    Py_RETURN_NONE;
}

/* mentions(data, text, start, end): returns whether `text`, in lower case, occurs in data[start:end] in any case of ASCII letters. */
KERNEL(mentions) {
    if (!arguments("mentions", count, 4)) return NULL;
    if (!PyBytes_Check(args[0]) || !PyBytes_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "mentions: searches bytes in bytes");
    Py_ssize_t start = PyLong_AsSsize_t(args[2]), end = PyLong_AsSsize_t(args[3]);
    if ((start == -1 || end == -1) && PyErr_Occurred()) return NULL;
    Py_ssize_t size = PySlice_AdjustIndices(PyBytes_GET_SIZE(args[0]), &start, &end, 1);
    const byte *data = (const byte *)PyBytes_AS_STRING(args[0]) + start, *text = (const byte *)PyBytes_AS_STRING(args[1]);
    return PyBool_FromLong(place(data, size, text, PyBytes_GET_SIZE(args[1]), 1) >= 0);
}

/* flat_end(data, at, most): returns one past the brace that closes the JSON object opened at `at`. Returns 0 if the object is nested, or
   does not end before `most`, or the brace is inside a string. */
KERNEL(flat_end) {
    if (!arguments("flat_end", count, 3)) return NULL;
    if (!PyBytes_Check(args[0])) return PyErr_Format(PyExc_TypeError, "flat_end: reads bytes");
    Py_ssize_t at = PyLong_AsSsize_t(args[1]), most = PyLong_AsSsize_t(args[2]), size = PyBytes_GET_SIZE(args[0]);
    if ((at == -1 || most == -1) && PyErr_Occurred()) return NULL;
    if (at < 0) return PyErr_Format(PyExc_ValueError, "flat_end: no object begins at %zd", at);
    const char *data = PyBytes_AS_STRING(args[0]);
    int quoted = 0;
    for (Py_ssize_t i = at; i < most && i < size; i++) {
        if (data[i] == '"') quoted = !quoted;
        else if (data[i] == '}') return PyLong_FromSsize_t(quoted ? 0 : i + 1);
        else if (data[i] == '{' && i > at) break;
    }
    return PyLong_FromLong(0);
}

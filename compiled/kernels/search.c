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

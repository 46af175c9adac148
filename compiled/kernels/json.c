/* Finds members and items of JSON texts without creating objects for the rest (RFC 8259). A text that has an error, or a form that these
   functions do not read, gives None: then the caller reads it with msgspec, which also says what is wrong. Like msgspec, they do not check
   that skipped strings are UTF-8. */
#include "arrays.h"
#include <string.h>

typedef unsigned char byte;

#define NESTED_MAX 256     /* objects and arrays inside one another */
#define AT_ONCE 64         /* bytes: a loop of this length becomes a few instructions on vectors */
#define EACH(byte) (0x0101010101010101ULL * (byte)) /* a word of eight such bytes */
#define COPIED_MAX 4096    /* bytes: longer parts are views of the text, shorter ones copies, which cost less than a view */

static inline int blank(byte c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

static inline const byte *past_blanks(const byte *at, const byte *end) {
    while (at < end && blank(*at)) at++;
    return at;
}

/* Returns the number that four hexadecimal digits at `at` stand for, or -1. */
static long hexadecimal(const byte *at, const byte *end) {
    long value = 0;
    if (end - at < 4) return -1;
    for (int i = 0; i < 4; i++) {
        byte c = at[i], letter = c | 32;
        if (c >= '0' && c <= '9') value = value << 4 | (c - '0');
        else if (letter >= 'a' && letter <= 'f') value = value << 4 | (letter - 'a' + 10);
        else return -1;
    }
    return value;
}

/* Each of these functions returns where a thing ends that begins at `at`, or NULL if there is no such thing. */

static const byte *past_escape(const byte *at, const byte *end) {
    if (end - at < 2) return NULL;
    switch (at[1]) {
    case 'u': break;
    case 'n': case 't': case '"': case '\\': case '/': case 'r': case 'b': case 'f': return at + 2;
    default: return NULL;
    }
    long code = hexadecimal(at + 2, end);
    if (code < 0 || (code >= 0xDC00 && code <= 0xDFFF)) return NULL;
    if (code < 0xD800 || code > 0xDFFF) return at + 6;
    if (end - at < 12 || at[6] != '\\' || at[7] != 'u') return NULL; /* half a surrogate pair */
    long low = hexadecimal(at + 8, end);
    return low >= 0xDC00 && low <= 0xDFFF ? at + 12 : NULL;
}

static inline int ends_run(byte c) { return (c == '"') | (c == '\\') | (c < 0x20); }

/* Returns whether one of the eight bytes at `at` ends a run. A byte x is below n if and only if (x - n) & ~x has the highest bit, apart
   from borrows, which only a lower byte below n causes. */
static inline int ends_in_word(const byte *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    uint64_t quotes = word ^ EACH('"'), slashes = word ^ EACH('\\');
    return (((quotes - EACH(1)) & ~quotes) | ((slashes - EACH(1)) & ~slashes) | ((word - EACH(0x20)) & ~word)) & EACH(0x80) ? 1 : 0;
}

/* Skips a run of plain bytes of a string: by words, and once it is long by blocks. */
static const byte *past_run(const byte *at, const byte *end) {
    for (const byte *start = at; end - at >= 8 && !ends_in_word(at);) {
        at += 8;
        while (at - start >= AT_ONCE && end - at >= AT_ONCE) {
            byte stops = 0;
            for (int i = 0; i < AT_ONCE; i++) stops |= ends_run(at[i]);
            if (stops) {
                start = at;
                break;
            }
            at += AT_ONCE;
        }
    }
    while (at < end && !ends_run(*at)) at++;
    return at;
}

/* `at` is behind the opening quote. */
static const byte *past_string(const byte *at, const byte *end) {
    for (;;) {
        at = past_run(at, end);
        if (at == end || *at < 0x20) return NULL;
        if (*at == '"') return at + 1;
        if ((at = past_escape(at, end)) == NULL) return NULL;
    }
}

static const byte *past_digits(const byte *at, const byte *end) {
    const byte *start = at;
    while (at < end && *at >= '0' && *at <= '9') at++;
    return at == start ? NULL : at;
}

static const byte *past_number(const byte *at, const byte *end) {
    if (at < end && *at == '-') at++;
    const byte *start = at;
    if ((at = past_digits(at, end)) == NULL || (*start == '0' && at - start > 1)) return NULL;
    if (at < end && *at == '.' && (at = past_digits(at + 1, end)) == NULL) return NULL;
    if (at < end && (*at | 32) == 'e') {
        at++;
        if (at < end && (*at == '+' || *at == '-')) at++;
        return past_digits(at, end);
    }
    return at;
}

static const byte *past_word(const byte *at, const byte *end, const char *word) {
    size_t size = strlen(word);
    return (size_t)(end - at) >= size && memcmp(at, word, size) == 0 ? at + size : NULL;
}

static const byte *past_simple(const byte *at, const byte *end) {
    switch (*at) {
    case '"': return past_string(at + 1, end);
    case 't': return past_word(at, end, "true");
    case 'f': return past_word(at, end, "false");
    case 'n': return past_word(at, end, "null");
    default: return past_number(at, end);
    }
}

/* A member's name with its colon. */
static const byte *past_name(const byte *at, const byte *end) {
    at = past_blanks(at, end);
    if (at == end || *at != '"' || (at = past_string(at + 1, end)) == NULL) return NULL;
    at = past_blanks(at, end);
    return at < end && *at == ':' ? at + 1 : NULL;
}

static const byte *past_value(const byte *at, const byte *end) {
    byte closing[NESTED_MAX];
    int depth = 0;
    for (;;) {
        at = past_blanks(at, end);
        if (at == end) return NULL;
        if (*at == '{' || *at == '[') {
            if (depth == NESTED_MAX) return NULL;
            byte closes = closing[depth++] = *at == '{' ? '}' : ']';
            at = past_blanks(at + 1, end);
            if (at < end && *at != closes) {
                if (closes == '}' && (at = past_name(at, end)) == NULL) return NULL;
                continue;
            }
        } else if ((at = past_simple(at, end)) == NULL) return NULL;
        for (;; at++) { /* behind a value: the ends of what it is in, or the next value */
            if (depth == 0) return at;
            at = past_blanks(at, end);
            if (at == end) return NULL;
            if (*at == ',') break;
            if (*at != closing[--depth]) return NULL;
        }
        at++;
        if (closing[depth - 1] == '}' && (at = past_name(at, end)) == NULL) return NULL;
    }
}

/* Returns the part of a text from `start` to `end`: bytes, or a view of the text if the part is long. */
static PyObject *part(PyObject *text, const byte *begin, const byte *start, const byte *end) {
    if (end - start <= COPIED_MAX) return PyBytes_FromStringAndSize((const char *)start, end - start);
    PyObject *from = PyLong_FromSsize_t(start - begin), *to = PyLong_FromSsize_t(end - begin), *cut = NULL;
    PyObject *view = PyMemoryView_FromObject(text), *slice = from != NULL && to != NULL ? PySlice_New(from, to, NULL) : NULL;
    if (view != NULL && slice != NULL) cut = PyObject_GetItem(view, slice);
    Py_XDECREF(from);
    Py_XDECREF(to);
    Py_XDECREF(view);
    Py_XDECREF(slice);
    return cut;
}

/* Puts the value at `start` into `found` if its member is one of `names`. Returns 1; 0: the member occurs twice; -1: exception. */
static int keep(PyObject *found, PyObject *names, PyObject *missing, const byte *name, Py_ssize_t size, PyObject *text,
                const byte *begin, const byte *start, const byte *end) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
        PyObject *wanted = PyTuple_GET_ITEM(names, i);
        if (PyBytes_GET_SIZE(wanted) != size || memcmp(PyBytes_AS_STRING(wanted), name, size) != 0) continue;
        if (PyTuple_GET_ITEM(found, i) != missing) return 0;
        PyObject *value = part(text, begin, start, end);
        if (value == NULL) return -1;
        PyTuple_SET_ITEM(found, i, value);
        Py_DECREF(missing);
        return 1;
    }
    return 1;
}

/* Fills `found` with the members of the object at begin...end. Returns 1; 0: it cannot be read; -1: exception. */
static int read_members(PyObject *found, PyObject *names, PyObject *missing, PyObject *text, const byte *begin, const byte *end) {
    const byte *at = past_blanks(begin, end);
    if (at == end || *at != '{') return 0;
    at = past_blanks(at + 1, end);
    if (at < end && *at == '}') return past_blanks(at + 1, end) == end;
    for (;; at++) {
        const byte *name = past_blanks(at, end), *name_end;
        if (name == end || *name != '"' || (name_end = past_string(++name, end)) == NULL) return 0;
        if (memchr(name, '\\', name_end - name) != NULL) return 0; /* another spelling of a name, perhaps of one of `names` */
        at = past_blanks(name_end, end);
        if (at == end || *at != ':') return 0;
        const byte *start = past_blanks(at + 1, end);
        if ((at = past_value(start, end)) == NULL) return 0;
        int kept = keep(found, names, missing, name, name_end - 1 - name, text, begin, start, at);
        if (kept != 1) return kept;
        at = past_blanks(at, end);
        if (at == end || (*at != ',' && *at != '}')) return 0;
        if (*at == '}') return past_blanks(at + 1, end) == end;
    }
}

/* members(text, names, missing): returns the values of these members of a JSON object, as JSON: a tuple with `missing` for each member that
   is missing. None: the text is no such object, or has an error, or one of `names` twice, or an escape in a name. `names`: a tuple of bytes. */
KERNEL(members) {
    if (!arguments("members", count, 3)) return NULL;
    PyObject *text = args[0], *names = args[1], *missing = args[2];
    int named = PyTuple_Check(names);
    for (Py_ssize_t i = 0; named && i < PyTuple_GET_SIZE(names); i++) named = PyBytes_Check(PyTuple_GET_ITEM(names, i));
    if (!named) return PyErr_Format(PyExc_TypeError, "members: needs a tuple of names, as bytes");
    Py_buffer read;
    if (PyObject_GetBuffer(text, &read, PyBUF_SIMPLE) < 0) return NULL;
    PyObject *found = PyTuple_New(PyTuple_GET_SIZE(names));
    for (Py_ssize_t i = 0; found != NULL && i < PyTuple_GET_SIZE(names); i++) PyTuple_SET_ITEM(found, i, Py_NewRef(missing));
    int state = found == NULL ? -1 : read_members(found, names, missing, text, read.buf, (const byte *)read.buf + read.len);
    PyBuffer_Release(&read);
    if (state == 1) return found;
    Py_XDECREF(found);
    if (state < 0) return NULL;
    Py_RETURN_NONE;
}

/* Appends the items of the array at begin...end to `found`. Returns 1; 0: it cannot be read; -1: exception. */
static int read_items(PyObject *found, PyObject *text, const byte *begin, const byte *end) {
    const byte *at = past_blanks(begin, end);
    if (at == end || *at != '[') return 0;
    at = past_blanks(at + 1, end);
    if (at < end && *at == ']') return past_blanks(at + 1, end) == end;
    for (;; at++) {
        const byte *start = past_blanks(at, end);
        if ((at = past_value(start, end)) == NULL) return 0;
        PyObject *item = part(text, begin, start, at);
        int failed = item == NULL || PyList_Append(found, item) < 0;
        Py_XDECREF(item);
        if (failed) return -1;
        at = past_blanks(at, end);
        if (at == end || (*at != ',' && *at != ']')) return 0;
        if (*at == ']') return past_blanks(at + 1, end) == end;
    }
}

/* items(text): returns the items of a JSON array, as JSON. None: the text is no array, or has an error. */
KERNEL(items) {
    if (!arguments("items", count, 1)) return NULL;
    Py_buffer read;
    if (PyObject_GetBuffer(args[0], &read, PyBUF_SIMPLE) < 0) return NULL;
    PyObject *found = PyList_New(0);
    int state = found == NULL ? -1 : read_items(found, args[0], read.buf, (const byte *)read.buf + read.len);
    PyBuffer_Release(&read);
    if (state == 1) return found;
    Py_XDECREF(found);
    if (state < 0) return NULL;
    Py_RETURN_NONE;
}

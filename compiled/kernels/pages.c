/* Reads what scrapes read again and again: the head of an answer, and a value that stands where it stood on the page before. The Python
   code with the same results is beside the calls: `plain_head` of `workers.supervisor.endpoints.http_answer`, `recalled` of `epp.protocol.exposition`. */
#include "arrays.h"
#include <string.h>

#define SHIFT_BYTES_MAX 256 /* as in `epp.protocol.exposition` */
#define LENGTH_DIGITS_MAX 18

typedef struct {
    const char *at;
    Py_ssize_t size;
} Text;

static inline Text text_of(PyObject *object) {
    return (Text){PyBytes_AS_STRING(object), PyBytes_GET_SIZE(object)};
}

/* Returns whether `what` stands at position `at` of `page`. */
static inline int stands(Text page, Py_ssize_t at, const char *what, Py_ssize_t size) {
    return size <= page.size - at && memcmp(page.at + at, what, size) == 0;
}

static inline int starts_family(Text page, Py_ssize_t line) {
    return stands(page, line, "\n# HELP ", 8) || stands(page, line, "\n# TYPE ", 8) || stands(page, line, "\n# EOF", 6);
}

/* Returns whether the line between the newlines at `at` and `end` is certainly the only series of its family. */
static int alone(Text page, Py_ssize_t at, Py_ssize_t end, Text text, Text name_line, Text type_line) {
    if (stands(page, end, name_line.at, name_line.size)) return 0;
    if (end + 1 < page.size && memchr("#\n\r \t", page.at[end + 1], 5) && !starts_family(page, end)) return 0;
    if (text.size > type_line.size && memcmp(text.at + 1, type_line.at, type_line.size) == 0) return 1;
    Py_ssize_t above = at;
    while (above > 0 && page.at[above - 1] != '\n') above--;
    if (stands(page, above, type_line.at, type_line.size)) return 1;
    return !stands(page, above, name_line.at + 1, name_line.size - 1) && !memchr("#\n\r", page.at[above], 3);
}

/* Reads the bytes from `start` to `end` as `float` does. Returns 0 if they are no number. A newline stands at `end`. */
static int read_number(const char *start, const char *end, double *value) {
    while (start < end && Py_ISSPACE(*start)) start++;
    while (start < end && Py_ISSPACE(end[-1])) end--;
    if (start == end || memchr(start, '_', end - start)) return 0;
    char *stop;
    *value = PyOS_string_to_double(start, &stop, NULL);
    if (*value == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return stop == end;
}

/* recall(page, text, at, name_line, type_line): see `recalled`. */
KERNEL(recall) {
    if (!arguments("recall", count, 5)) return NULL;
    if (!PyBytes_Check(args[0]) || !PyBytes_Check(args[1]) || !PyBytes_Check(args[3]) || !PyBytes_Check(args[4]))
        return PyErr_Format(PyExc_TypeError, "recall: page, text and lines are bytes");
    Text page = text_of(args[0]), text = text_of(args[1]), name_line = text_of(args[3]), type_line = text_of(args[4]);
    Py_ssize_t at = PyLong_AsSsize_t(args[2]);
    if (at == -1 && PyErr_Occurred()) return NULL;
    if (at < 0 || text.size < 1 || name_line.size < 1)
        return PyErr_Format(PyExc_ValueError, "recall: needs a text, a name, and a position that is not negative");
    if (at > page.size || !stands(page, at, text.at, text.size)) {
        Py_ssize_t low = at > SHIFT_BYTES_MAX ? at - SHIFT_BYTES_MAX : 0;
        Py_ssize_t high = page.size - at < text.size + SHIFT_BYTES_MAX ? page.size : at + text.size + SHIFT_BYTES_MAX;
        const char *found = low < high ? memmem(page.at + low, high - low, text.at, text.size) : NULL;
        if (found == NULL) Py_RETURN_NONE;
        at = found - page.at;
    }
    const char *start = page.at + at + text.size, *end = memchr(start, '\n', page.at + page.size - start);
    double value;
    if (end == NULL || !alone(page, at, end - page.at, text, name_line, type_line) || !read_number(start, end, &value))
        Py_RETURN_NONE;
    return Py_BuildValue("nd", at, value);
}

/* Returns whether a line begins with `name`, in any case. `name`: lower case, with its colon. */
static inline int is_header(const char *line, const char *end, const char *name, Py_ssize_t size) {
    if (end - line < size) return 0;
    for (Py_ssize_t i = 0; i < size; i++)
        if (Py_TOLOWER(line[i]) != name[i]) return 0;
    return 1;
}

#define IS_HEADER(line, end, name) is_header(line, end, name, sizeof(name) - 1)

/* Returns the number between `start` and `end`, with blanks around it; -1 if there is none, or it is too long. */
static Py_ssize_t length_of(const char *start, const char *end) {
    while (start < end && Py_ISSPACE(*start)) start++;
    while (start < end && Py_ISSPACE(end[-1])) end--;
    if (start == end || end - start > LENGTH_DIGITS_MAX) return -1;
    Py_ssize_t length = 0;
    for (; start < end; start++) {
        if (!Py_ISDIGIT(*start)) return -1;
        length = length * 10 + (*start - '0');
    }
    return length;
}

/* Returns where the body begins, and stores its length; -1 if the head is not complete, or not plain. */
static Py_ssize_t read_head(const char *data, const char *end, Py_ssize_t *length) {
    if (!IS_HEADER(data, end, "http/1.1 200")) return -1;
    *length = -1;
    const char *at = data;
    while ((at = memmem(at, end - at, "\r\n", 2)) != NULL) {
        const char *line = at + 2, *next;
        if (end - line >= 2 && line[0] == '\r' && line[1] == '\n') return *length < 0 ? -1 : line + 2 - data;
        if (IS_HEADER(line, end, "transfer-encoding:") || IS_HEADER(line, end, "content-encoding:") ||
            IS_HEADER(line, end, "connection:"))
            return -1;
        if (*length < 0 && IS_HEADER(line, end, "content-length:")) {
            const char *digits = line + 15;
            next = memmem(digits, end - digits, "\r\n", 2);
            if (next == NULL || (*length = length_of(digits, next)) < 0) return -1;
        }
        at = line;
    }
    return -1;
}

/* plain_head(data, most): see `plain_head`. */
KERNEL(plain_head) {
    if (!arguments("plain_head", count, 2)) return NULL;
    Py_ssize_t most = PyLong_AsSsize_t(args[1]), length;
    if (most == -1 && PyErr_Occurred()) return NULL;
    Py_buffer data;
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0) return NULL;
    Py_ssize_t size = data.len < most ? data.len : most < 0 ? 0 : most;
    Py_ssize_t body = read_head(data.buf, (const char *)data.buf + size, &length);
    PyBuffer_Release(&data);
    if (body < 0) Py_RETURN_NONE;
    return Py_BuildValue("nn", body, length);
}

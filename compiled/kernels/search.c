/* Searches bytes. `bytes.find` of Python 3.11 packs its arguments into a tuple and parses them, which costs more than most searches. */
#include "arrays.h"
#include <string.h>

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
    const char *found = NULL;
    if (end - start >= length) found = memmem(data + start, end - start, PyBytes_AS_STRING(args[1]), length);
    return PyLong_FromSsize_t(found == NULL ? -1 : found - data);
}

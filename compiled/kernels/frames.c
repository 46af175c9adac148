/* Reads the frames of HTTP/2 (`workers.transport.http2`). */
#include "arrays.h"

static inline unsigned long word(const unsigned char *at) {
    return (unsigned long)at[0] << 24 | (unsigned long)at[1] << 16 | (unsigned long)at[2] << 8 | at[3];
}

/* framed_message(data, at): reads the header of a frame and the prefix of a gRPC message at data[at:at + 14]. Returns five numbers: the
   frame's length and type in one word, flags, stream; the message's compressed flag and length. */
KERNEL(framed_message) {
    if (!arguments("framed_message", count, 2)) return NULL;
    if (!PyBytes_Check(args[0])) return PyErr_Format(PyExc_TypeError, "framed_message: reads bytes");
    Py_ssize_t at = PyLong_AsSsize_t(args[1]);
    if (at == -1 && PyErr_Occurred()) return NULL;
    if (at < 0 || at > PyBytes_GET_SIZE(args[0]) - 14)
        return PyErr_Format(PyExc_ValueError, "framed_message: there are no 14 bytes at %zd", at);
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(args[0]) + at;
    unsigned long fields[5] = {word(data), data[4], word(data + 5), data[9], word(data + 10)};
    PyObject *read = PyTuple_New(5);
    for (int i = 0; read != NULL && i < 5; i++) {
        PyObject *number = PyLong_FromUnsignedLong(fields[i]);
        if (number == NULL) Py_CLEAR(read);
        else PyTuple_SET_ITEM(read, i, number);
    }
    return read;
}

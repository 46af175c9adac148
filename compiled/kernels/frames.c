/* Reads and writes the headers of HTTP/2 frames (`workers.transport.http2`, `workers.transport.frames`). */
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

static inline void put_word(char *at, unsigned long word) {
    for (int i = 0; i < 4; i++) at[i] = (char)(word >> (24 - 8 * i));
}

/* data_header(size, number): returns the header of a DATA frame without flags, for a payload of `size` bytes on stream `number`. */
KERNEL(data_header) {
    if (!arguments("data_header", count, 2)) return NULL;
    unsigned long size = PyLong_AsUnsignedLong(args[0]), number = PyLong_AsUnsignedLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (size >= 1 << 24 || number > UINT32_MAX) return PyErr_Format(PyExc_OverflowError, "data_header: %lu or %lu is too large", size, number);
    PyObject *header = PyBytes_FromStringAndSize(NULL, 9);
    if (header == NULL) return NULL;
    char *bytes = PyBytes_AS_STRING(header);
    put_word(bytes, size << 8); /* the type, DATA, is 0 */
    bytes[4] = 0;
    put_word(bytes + 5, number);
    return header;
}

/* numbered(frame, number): returns a frame with another stream number. */
KERNEL(numbered) {
    if (!arguments("numbered", count, 2)) return NULL;
    if (!PyBytes_Check(args[0]) || PyBytes_GET_SIZE(args[0]) < 9) return PyErr_Format(PyExc_TypeError, "numbered: needs the bytes of a frame");
    unsigned long number = PyLong_AsUnsignedLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (number > UINT32_MAX) return PyErr_Format(PyExc_OverflowError, "numbered: %lu is too large", number);
    PyObject *frame = PyBytes_FromStringAndSize(PyBytes_AS_STRING(args[0]), PyBytes_GET_SIZE(args[0]));
    if (frame != NULL) put_word(PyBytes_AS_STRING(frame) + 5, number);
    return frame;
}

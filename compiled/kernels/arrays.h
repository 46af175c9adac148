/* Gives kernels access to NumPy arrays. A kernel checks type, layout and length once, and then loops over plain pointers. */
#ifndef EPP_KERNELS_ARRAYS_H
#define EPP_KERNELS_ARRAYS_H

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL epp_kernels_array_api
#ifndef EPP_KERNELS_MODULE
#define NO_IMPORT_ARRAY
#endif
#include <Python.h>
#include <numpy/arrayobject.h>
#include <stdint.h>

/* NumPy's own macro calls a function for this product. */
#undef PyArray_SIZE
#define PyArray_SIZE(array) size_of(array)
static inline npy_intp size_of(PyArrayObject *array) {
    npy_intp size = 1;
    for (int i = 0; i < PyArray_NDIM(array); i++) size *= PyArray_DIM(array, i);
    return size;
}

/* As Python's max and min: the first one, unless the other one is larger or smaller. So a NaN in `a` stays, and one in `b` does not count. */
static inline double larger(double a, double b) { return b > a ? b : a; }
static inline double smaller(double a, double b) { return b < a ? b : a; }

#define DATA(type, array) ((type *)PyArray_DATA(array))

/* Returns the values of `object` as a contiguous, aligned array of this type: the object itself, or a copy.
   Returns a new reference, or NULL with an exception (TypeError if the values do not fit the type). */
static inline PyArrayObject *input(PyObject *object, int type) {
    if (PyArray_Check(object)) {
        PyArrayObject *array = (PyArrayObject *)object;
        if (PyArray_TYPE(array) == type && PyArray_ISCARRAY_RO(array)) {
            Py_INCREF(object);
            return array;
        }
    }
    return (PyArrayObject *)PyArray_FROM_OTF(object, type, NPY_ARRAY_IN_ARRAY);
}

/* Checks an array that a kernel reads or writes in place, such as shared memory. Returns a borrowed reference, or NULL with a TypeError. */
static inline PyArrayObject *in_place(PyObject *object, int type, int dimensions, int written, const char *name) {
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || PyArray_TYPE(array) != type || PyArray_NDIM(array) != dimensions ||
        !(written ? PyArray_ISCARRAY(array) : PyArray_ISCARRAY_RO(array))) {
        PyErr_Format(PyExc_TypeError, "%s: a kernel needs a contiguous%s array of its own type and dimensions", name,
                     written ? " writable" : "");
        return NULL;
    }
    return array;
}

/* Reads the load of endpoints: float64, or int64 as in areas. `load_at` returns one of the numbers. */
static inline PyArrayObject *loads(PyObject *object) {
    int counted = PyArray_Check(object) && PyArray_TYPE((PyArrayObject *)object) == NPY_INT64;
    return input(object, counted ? NPY_INT64 : NPY_DOUBLE);
}

static inline double load_at(PyArrayObject *array, npy_intp i) {
    return PyArray_TYPE(array) == NPY_INT64 ? (double)DATA(int64_t, array)[i] : DATA(double, array)[i];
}

/* Creates an array of one dimension, without initialising it. */
static inline PyArrayObject *output(npy_intp count, int type) {
    return (PyArrayObject *)PyArray_EMPTY(1, &count, type, 0);
}

/* Returns 1 if a function got the right number of arguments. Otherwise sets TypeError and returns 0. */
static inline int arguments(const char *name, Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, given);
    return 0;
}

/* The lowest and the highest of some values. */
struct range {
    double low, high;
};

/* Returns the range of n values. One NaN makes both ends NaN. */
static inline struct range range_of(const double *values, npy_intp n) {
    struct range found = {n > 0 ? values[0] : 0.0, n > 0 ? values[0] : 0.0};
    for (npy_intp i = 0; i < n; i++) {
        if (values[i] < found.low || values[i] != values[i]) found.low = values[i];
        if (values[i] > found.high || values[i] != values[i]) found.high = values[i];
        if (values[i] != values[i]) break;
    }
    return found;
}

/* Returns how far `value` is below the high end: from 0 to 1, and 1 if the ends are equal. */
static inline double below(struct range range, double value) {
    return range.low == range.high ? 1.0 : (range.high - value) / (range.high - range.low);
}

/* Returns how many requests wait, with those sent since the scrape: max(scraped, inflight - before). A NaN stays. */
static inline double waiting_now(double inflight, double before, double scraped) {
    double since = inflight - before;
    return scraped > since || scraped != scraped ? scraped : since;
}

#define KERNEL(name) PyObject *name(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)

#endif

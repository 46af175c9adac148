/* Computes scores of endpoints in one pass over a few numbers. NumPy would take several calls. */
#include "arrays.h"

#include <math.h>

static PyObject *unequal(const char *name) {
    return PyErr_Format(PyExc_ValueError, "%s: the arrays differ in length", name);
}

/* fewest(values): returns (max - x) / (max - min), or 1 for all values if they are equal. */
KERNEL(fewest) {
    if (!arguments("fewest", count, 1)) return NULL;
    PyArrayObject *values = input(args[0], NPY_DOUBLE);
    if (values == NULL) return NULL;
    npy_intp n = PyArray_SIZE(values);
    PyArrayObject *scores = output(n, NPY_DOUBLE);
    if (scores != NULL) {
        const double *v = DATA(double, values);
        struct range range = range_of(v, n);
        for (npy_intp i = 0; i < n; i++) DATA(double, scores)[i] = below(range, v[i]);
    }
    Py_DECREF(values);
    return (PyObject *)scores;
}

/* waiting(inflight, before, scraped): returns max(scraped, inflight - before). `inflight` may be int64, as in areas. */
KERNEL(waiting) {
    if (!arguments("waiting", count, 3)) return NULL;
    PyArrayObject *made = NULL, *arrays[3] = {NULL, NULL, NULL};
    for (int i = 0; i < 3; i++)
        if ((arrays[i] = i == 0 ? loads(args[0]) : input(args[i], NPY_DOUBLE)) == NULL) goto end;
    npy_intp n = PyArray_SIZE(arrays[0]);
    if (PyArray_SIZE(arrays[1]) != n || PyArray_SIZE(arrays[2]) != n) {
        unequal("waiting");
        goto end;
    }
    if ((made = output(n, NPY_DOUBLE)) == NULL) goto end;
    const double *before = DATA(double, arrays[1]), *scraped = DATA(double, arrays[2]);
    double *out = DATA(double, made);
    for (npy_intp i = 0; i < n; i++) out[i] = waiting_now(load_at(arrays[0], i), before[i], scraped[i]);
end:
    for (int i = 0; i < 3; i++) Py_XDECREF(arrays[i]);
    return (PyObject *)made;
}

/* mean_pressure(inflight, before, least, full): returns the mean of max(least, (inflight - before) / full) over at least one endpoint.
   `inflight` may be int64, as in areas. */
KERNEL(mean_pressure) {
    if (!arguments("mean_pressure", count, 4)) return NULL;
    double full = PyFloat_AsDouble(args[3]), sum = 0.0;
    if (full == -1.0 && PyErr_Occurred()) return NULL;
    PyArrayObject *before = NULL, *least = NULL, *inflight = loads(args[0]);
    PyObject *mean = NULL;
    if (inflight == NULL || (before = input(args[1], NPY_DOUBLE)) == NULL || (least = input(args[2], NPY_DOUBLE)) == NULL) goto end;
    npy_intp n = PyArray_SIZE(inflight);
    if (n < 1 || PyArray_SIZE(before) != n || PyArray_SIZE(least) != n) {
        unequal("mean_pressure");
        goto end;
    }
    for (npy_intp i = 0; i < n; i++) {
        double counted = (load_at(inflight, i) - DATA(double, before)[i]) / full, floor = DATA(double, least)[i];
        sum += floor > counted || floor != floor ? floor : counted;
    }
    mean = PyFloat_FromDouble(sum / (double)n);
end:
    Py_XDECREF(inflight);
    Py_XDECREF(before);
    Py_XDECREF(least);
    return mean;
}

/* add_scaled(totals, scores, weight): totals += weight * scores, in place. A single score counts for all. */
KERNEL(add_scaled) {
    if (!arguments("add_scaled", count, 3)) return NULL;
    double weight = PyFloat_AsDouble(args[2]);
    if (weight == -1.0 && PyErr_Occurred()) return NULL;
    PyArrayObject *scores = input(args[1], NPY_DOUBLE);
    if (scores == NULL) return NULL;
    PyArrayObject *totals = (PyArrayObject *)PyArray_FROM_OTF(args[0], NPY_DOUBLE, NPY_ARRAY_INOUT_ARRAY2);
    if (totals == NULL) {
        Py_DECREF(scores);
        return NULL;
    }
    npy_intp n = PyArray_SIZE(totals), given = PyArray_SIZE(scores), step = given == 1 ? 0 : 1;
    int fits = given == n || given == 1;
    if (fits) {
        double *t = DATA(double, totals);
        const double *s = DATA(double, scores);
        for (npy_intp i = 0; i < n; i++) t[i] += weight * s[i * step];
    }
    Py_DECREF(scores);
    int failed = PyArray_ResolveWritebackIfCopy(totals) < 0;
    Py_DECREF(totals);
    if (failed) return NULL;
    if (!fits) return unequal("add_scaled");
    Py_RETURN_NONE;
}

/* copied(values): returns a copy. */
KERNEL(copied) {
    if (!arguments("copied", count, 1)) return NULL;
    PyArrayObject *values = input(args[0], NPY_DOUBLE);
    if (values == NULL) return NULL;
    PyArrayObject *copy = output(PyArray_SIZE(values), NPY_DOUBLE);
    if (copy != NULL) memcpy(PyArray_DATA(copy), PyArray_DATA(values), PyArray_SIZE(values) * sizeof(double));
    Py_DECREF(values);
    return (PyObject *)copy;
}

/* reused(held, each, tokens, sizes): returns how many of the tokens of a prompt each server reuses: of `held` blocks of `each` tokens, whole
   blocks of its own size, but never the last token. */
KERNEL(reused) {
    if (!arguments("reused", count, 4)) return NULL;
    double each = PyFloat_AsDouble(args[1]), most = PyFloat_AsDouble(args[2]) - 1.0;
    if (PyErr_Occurred()) return NULL;
    if (most < 0.0) most = 0.0;
    PyArrayObject *tokens = NULL, *sizes = NULL, *held = input(args[0], NPY_DOUBLE);
    if (held == NULL || (sizes = input(args[3], NPY_DOUBLE)) == NULL) goto end;
    npy_intp n = PyArray_SIZE(held);
    if (PyArray_SIZE(sizes) != n) {
        unequal("reused");
        goto end;
    }
    if ((tokens = output(n, NPY_DOUBLE)) == NULL) goto end;
    const double *h = DATA(double, held), *size = DATA(double, sizes);
    for (npy_intp i = 0; i < n; i++) {
        double all = h[i] * each;
        DATA(double, tokens)[i] = floor((all < most ? all : most) / size[i]) * size[i];
    }
end:
    Py_XDECREF(held);
    Py_XDECREF(sizes);
    return (PyObject *)tokens;
}

/* share(blocks, total): returns blocks / total. */
KERNEL(share) {
    if (!arguments("share", count, 2)) return NULL;
    double total = PyFloat_AsDouble(args[1]);
    if (total == -1.0 && PyErr_Occurred()) return NULL;
    PyArrayObject *blocks = input(args[0], NPY_DOUBLE);
    if (blocks == NULL) return NULL;
    npy_intp n = PyArray_SIZE(blocks);
    PyArrayObject *shares = output(n, NPY_DOUBLE);
    if (shares != NULL) {
        const double *b = DATA(double, blocks);
        double *s = DATA(double, shares);
        for (npy_intp i = 0; i < n; i++) s[i] = b[i] / total;
    }
    Py_DECREF(blocks);
    return (PyObject *)shares;
}

/* token_load(ahead, tokens, held, block_tokens, threshold): returns 1 - t / threshold per endpoint, where t is
   ahead + max(tokens - held * block_tokens, 0), or ahead + tokens if `held` is None, limited to the range from 0 to the threshold. */
KERNEL(token_load) {
    if (!arguments("token_load", count, 5)) return NULL;
    double tokens = PyFloat_AsDouble(args[1]), each = PyFloat_AsDouble(args[3]), threshold = PyFloat_AsDouble(args[4]);
    if (PyErr_Occurred()) return NULL;
    PyArrayObject *held = NULL, *scores = NULL, *ahead = input(args[0], NPY_DOUBLE);
    if (ahead == NULL) return NULL;
    npy_intp n = PyArray_SIZE(ahead);
    if (args[2] != Py_None) {
        if ((held = input(args[2], NPY_DOUBLE)) == NULL) goto end;
        if (PyArray_SIZE(held) != n) {
            unequal("token_load");
            goto end;
        }
    }
    if ((scores = output(n, NPY_DOUBLE)) == NULL) goto end;
    const double *a = DATA(double, ahead), *h = held == NULL ? NULL : DATA(double, held);
    double *s = DATA(double, scores);
    for (npy_intp i = 0; i < n; i++) {
        double left = h == NULL ? tokens : tokens - h[i] * each;
        double load = a[i] + (h != NULL && left < 0.0 ? 0.0 : left); /* a NaN stays, because comparisons with it are false */
        if (load > threshold) load = threshold;
        if (load < 0.0) load = 0.0;
        s[i] = 1.0 - load / threshold;
    }
end:
    Py_DECREF(ahead);
    Py_XDECREF(held);
    return (PyObject *)scores;
}

/* highest(totals): returns the indices of the largest total, as a list. NaN counts as less than every number. If all totals are NaN,
   returns all indices. */
KERNEL(highest) {
    if (!arguments("highest", count, 1)) return NULL;
    PyArrayObject *totals = input(args[0], NPY_DOUBLE);
    if (totals == NULL) return NULL;
    const double *t = DATA(double, totals);
    npy_intp n = PyArray_SIZE(totals), first = -1;
    for (npy_intp i = 0; i < n; i++)
        if (t[i] == t[i] && (first < 0 || t[i] > t[first])) first = i;
    PyObject *found = PyList_New(0);
    for (npy_intp i = first < 0 ? 0 : first; found != NULL && i < n; i++) {
        if (first >= 0 && t[i] != t[first]) continue;
        PyObject *index = PyLong_FromSsize_t(i);
        if (index == NULL || PyList_Append(found, index) < 0) Py_CLEAR(found);
        Py_XDECREF(index);
    }
    Py_DECREF(totals);
    return found;
}

/* by_row(depths, row_of, rows): turns a mapping from owner to depth into an array with one depth per row, by `row_of` (owner -> row).
   Leaves out owners without a row. A row without an owner in `depths` gets 0. */
KERNEL(by_row) {
    if (!arguments("by_row", count, 3)) return NULL;
    if (!PyDict_Check(args[0]) || !PyDict_Check(args[1])) return PyErr_Format(PyExc_TypeError, "by_row needs two dicts");
    npy_intp rows = PyLong_AsSsize_t(args[2]);
    if (rows < 0) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "by_row: %zd rows", rows);
    PyArrayObject *made = (PyArrayObject *)PyArray_ZEROS(1, &rows, NPY_DOUBLE, 0);
    if (made == NULL) return NULL;
    PyObject *owner, *depth;
    for (Py_ssize_t at = 0; PyDict_Next(args[0], &at, &owner, &depth);) {
        PyObject *row = PyDict_GetItemWithError(args[1], owner);
        if (row == NULL) {
            if (PyErr_Occurred()) goto failed;
            continue;
        }
        Py_ssize_t index = PyLong_AsSsize_t(row);
        double blocks = PyFloat_AsDouble(depth);
        if (PyErr_Occurred()) goto failed;
        if (index < 0 || index >= rows) {
            PyErr_Format(PyExc_IndexError, "by_row: row %zd of %zd", index, rows);
            goto failed;
        }
        DATA(double, made)[index] = blocks;
    }
    return (PyObject *)made;
failed:
    Py_DECREF(made);
    return NULL;
}

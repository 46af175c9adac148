/* Carries the loads of endpoints from one page to the next (`workers.worker.extproc.account` says how). */
#include "arrays.h"
#include <float.h>
#include <math.h>

/* What is known of the last page of a slot, in the order of `compiled.kernels.loads_reference`. */
typedef struct {
    double generation, page_at, at, counted, batch, full, held;
} Known;
#define KNOWN ((npy_intp)(sizeof(Known) / sizeof(double)))

/* Returns the value, with 0 for NaN and the largest number for infinity, as `numpy.nan_to_num` does. */
static inline double number(double value) {
    if (value != value) return 0.0;
    return value > DBL_MAX ? DBL_MAX : value < -DBL_MAX ? -DBL_MAX : value;
}

/* Takes a page of an endpoint, unless it is the one that is known. */
static void take(Known *known, double generation, double page_at, double running, double waiting, double kv, double counted) {
    int another = known->generation != generation;
    if (!another && known->page_at == page_at) return;
    double batch = another ? 0.0 : known->batch;
    int full = waiting > 0.0;
    known->full = full || (known->full != 0.0 && !another && running <= batch);
    known->batch = full ? running : larger(batch, running);
    if (running > 0.0) known->held = number(kv) / larger(running, 1.0);
    else if (another) known->held = 0.0;
    *known = (Known){generation, page_at, page_at, counted, known->batch, known->full, known->held};
}

enum { GENERATION, PAGE_AT, RUNNING, WAITING, KV, COUNTED, INFLIGHT, INPUTS };

static int arrays_of(PyArrayObject *arrays[INPUTS], PyObject *const *args, npy_intp n) {
    for (int i = 0; i < INPUTS; i++) {
        arrays[i] = i == INFLIGHT ? loads(args[i]) : input(args[i], i == GENERATION ? NPY_UINT64 : NPY_DOUBLE);
        if (arrays[i] == NULL) return 0;
        if (PyArray_NDIM(arrays[i]) == 1 && PyArray_SIZE(arrays[i]) == n) continue;
        PyErr_Format(PyExc_ValueError, "carry: the arrays differ in length");
        return 0;
    }
    return 1;
}

/* Returns running, waiting, KV usage and counted requests of the n endpoints now; None if nothing has moved since their pages. */
static PyObject *carried(Known *known, const npy_intp *slots, PyArrayObject *in[INPUTS], npy_intp n, double now, double step_s) {
    double most = 0.0;
    int moved = 0;
    for (npy_intp i = 0; i < n; i++) {
        Known *each = known + slots[i];
        double page_at = DATA(double, in[PAGE_AT])[i], counted = DATA(double, in[COUNTED])[i];
        take(each, (double)DATA(uint64_t, in[GENERATION])[i], page_at, number(DATA(double, in[RUNNING])[i]),
             number(DATA(double, in[WAITING])[i]), DATA(double, in[KV])[i], counted);
        if (now - each->at > step_s && page_at > 0.0) each->counted = load_at(in[INFLIGHT], i), each->at = now;
        moved |= each->counted - counted != 0.0;
        most = larger(most, each->batch);
    }
    if (!moved) Py_RETURN_NONE;
    PyArrayObject *out[4] = {NULL};
    PyObject *all = NULL;
    for (int i = 0; i < 4; i++)
        if ((out[i] = output(n, NPY_DOUBLE)) == NULL) goto done;
    for (npy_intp i = 0; i < n; i++) {
        const Known *each = known + slots[i];
        double page_runs = DATA(double, in[RUNNING])[i], page_waits = DATA(double, in[WAITING])[i], kv = DATA(double, in[KV])[i];
        double running = number(page_runs), more = each->counted - DATA(double, in[COUNTED])[i];
        double total = larger(running + number(page_waits) + more, 0.0), batch = each->full != 0.0 ? each->batch : most;
        double runs = total < batch ? total : batch;
        kv += (runs - running) * each->held;
        DATA(double, out[0])[i] = page_runs != page_runs ? NAN : runs;
        DATA(double, out[1])[i] = page_waits != page_waits ? NAN : total - runs;
        DATA(double, out[2])[i] = kv < 0.0 ? 0.0 : kv > 1.0 ? 1.0 : kv;
        DATA(double, out[3])[i] = each->counted;
    }
    all = PyTuple_Pack(4, out[0], out[1], out[2], out[3]);
done:
    for (int i = 0; i < 4; i++) Py_XDECREF(out[i]);
    return all;
}

/* carry(known, slots, generation, page_at, running, waiting, kv, counted, inflight, now, step_s): as in `loads_reference`. */
KERNEL(carry) {
    if (!arguments("carry", count, 4 + INPUTS)) return NULL;
    PyArrayObject *known = in_place(args[0], NPY_DOUBLE, 2, 1, "carry: known"), *slots = in_place(args[1], NPY_INTP, 1, 0, "carry: slots");
    if (known == NULL || slots == NULL) return NULL;
    double now = PyFloat_AsDouble(args[2 + INPUTS]), step_s = PyFloat_AsDouble(args[3 + INPUTS]);
    if (PyErr_Occurred()) return NULL;
    if (PyArray_DIM(known, 1) != KNOWN) return PyErr_Format(PyExc_ValueError, "carry: a row has %zd numbers", KNOWN);
    npy_intp n = PyArray_SIZE(slots);
    for (npy_intp i = 0; i < n; i++)
        if (DATA(npy_intp, slots)[i] < 0 || DATA(npy_intp, slots)[i] >= PyArray_DIM(known, 0))
            return PyErr_Format(PyExc_IndexError, "carry: there is no slot %zd", DATA(npy_intp, slots)[i]);
    PyArrayObject *in[INPUTS] = {NULL};
    PyObject *result = NULL;
    if (arrays_of(in, args + 2, n)) result = carried(DATA(Known, known), DATA(npy_intp, slots), in, n, now, step_s);
    for (int i = 0; i < INPUTS; i++) Py_XDECREF(in[i]);
    return result;
}

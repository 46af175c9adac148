/* Counts values in the histograms of an area (`shm.histograms`). */
#include "arrays.h"

#define PLAN_COLUMNS 3 /* per histogram: the place of its sum, its first bound, the number of its bounds */

/* The histograms of an area, from the first four arguments of a kernel. */
typedef struct {
    int64_t *cells;
    const int64_t *plan;
    const double *bounds;
    npy_intp size, histograms, all_bounds, base;
} Area;

/* Reads the arguments cells, plan, bounds and base. Returns 1, or 0 with an exception. */
static int area_of(PyObject *const *args, Area *area) {
    PyArrayObject *cells = in_place(args[0], NPY_INT64, 1, 1, "observe: cells"),
                  *plan = in_place(args[1], NPY_INT64, 2, 0, "observe: plan"),
                  *bounds = in_place(args[2], NPY_DOUBLE, 1, 0, "observe: bounds");
    if (cells == NULL || plan == NULL || bounds == NULL) return 0;
    *area = (Area){DATA(int64_t, cells), DATA(int64_t, plan), DATA(double, bounds), PyArray_SIZE(cells),
                   PyArray_DIM(plan, 0), PyArray_SIZE(bounds), PyLong_AsSsize_t(args[3])};
    if (PyErr_Occurred()) return 0;
    if (PyArray_DIM(plan, 1) == PLAN_COLUMNS) return 1;
    PyErr_Format(PyExc_ValueError, "observe: a plan has %d columns", PLAN_COLUMNS);
    return 0;
}

static inline npy_intp bin(const double *bounds, npy_intp count, double value) {
    npy_intp low = 0, high = count;
    while (low < high) {
        npy_intp middle = (low + high) >> 1;
        if (bounds[middle] < value) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Adds a value to the sum of a histogram, and counts it in its bucket. Returns 1, or 0 with an exception. */
static int count_in(const Area *area, npy_intp index, double value) {
    if (index < 0 || index >= area->histograms) return PyErr_Format(PyExc_IndexError, "observe: there is no histogram %zd", index), 0;
    const int64_t *plan = area->plan + index * PLAN_COLUMNS;
    npy_intp at = area->base + plan[0], first = plan[1], buckets = plan[2];
    if (at < 0 || first < 0 || buckets < 0 || first > area->all_bounds - buckets || at > area->size - buckets - 2)
        return PyErr_Format(PyExc_ValueError, "observe: a histogram at %zd is outside its area", at), 0;
    area->cells[at + 1 + bin(area->bounds + first, buckets, value)] += 1;
    *(double *)(area->cells + at) += value;
    return 1;
}

/* observe(cells, plan, bounds, base, index, value): counts a value in a histogram. `cells`: the words of an area. `plan`: a row per histogram,
   see PLAN_COLUMNS. `bounds`: those of all histograms, one after the other. `base`: what to add to the place of the histogram. */
KERNEL(observe) {
    Area area;
    if (!arguments("observe", count, 6) || !area_of(args, &area)) return NULL;
    npy_intp index = PyLong_AsSsize_t(args[4]);
    double value = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred() || !count_in(&area, index, value)) return NULL;
    Py_RETURN_NONE;
}

/* observe_each(cells, plan, bounds, base, values): counts one value in each of the first histograms. `values`: a tuple. NaN counts
   nowhere. */
KERNEL(observe_each) {
    Area area;
    if (!arguments("observe_each", count, 5) || !area_of(args, &area)) return NULL;
    if (!PyTuple_Check(args[4])) return PyErr_Format(PyExc_TypeError, "observe_each: the values are a tuple");
    for (npy_intp index = 0; index < PyTuple_GET_SIZE(args[4]); index++) {
        double value = PyFloat_AsDouble(PyTuple_GET_ITEM(args[4], index));
        if (value == -1.0 && PyErr_Occurred()) return NULL;
        if (value == value && !count_in(&area, index, value)) return NULL;
    }
    Py_RETURN_NONE;
}

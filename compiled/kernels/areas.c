/* Sums words over areas, copies rows, and fills histograms (`shm.areas`, `shm.seqlock` and `shm.series` have the layouts). */
#include "arrays.h"

typedef struct {
    const int64_t *words, *serving;
    npy_intp count, width; /* number of areas, and words of each */
} Areas;

/* Checks the areas (int64, shape (workers, words)) and their serving words (int64, shape (workers,)). */
static int areas_of(Areas *all, PyObject *areas, PyObject *serving, const char *name) {
    PyArrayObject *words = in_place(areas, NPY_INT64, 2, 0, name), *serves = in_place(serving, NPY_INT64, 1, 0, name);
    if (words == NULL || serves == NULL) return 0;
    *all = (Areas){DATA(int64_t, words), DATA(int64_t, serves), PyArray_DIM(words, 0), PyArray_DIM(words, 1)};
    if (PyArray_SIZE(serves) == all->count) return 1;
    PyErr_Format(PyExc_ValueError, "%s: %zd areas have %zd serving words", name, all->count, PyArray_SIZE(serves));
    return 0;
}

/* Returns the words of an area, NULL if it does not serve. */
static const int64_t *serving_area(const Areas *all, npy_intp area) {
    return __atomic_load_n(all->serving + area, __ATOMIC_RELAXED) ? all->words + area * all->width : NULL;
}

static int inside(const Areas *all, npy_intp at, npy_intp slots, const char *name) {
    if (at >= 0 && slots >= 0 && at <= all->width - slots) return 1;
    PyErr_Format(PyExc_ValueError, "%s: %zd+%zd is outside areas of %zd words", name, at, slots, all->width);
    return 0;
}

static inline void add(PyArrayObject *sums, int type, npy_intp at, int64_t word) {
    if (type == NPY_INT64) DATA(int64_t, sums)[at] += word;
    else DATA(double, sums)[at] += (double)word;
}

/* Returns an array of this type: int64 or float64. It has the sums of each of the `slots` words from word `at` on, over the areas that
   serve. `more`: None, or words that are added: int64, shape (slots or more,). */
static PyObject *sums_of(const Areas *all, npy_intp at, npy_intp slots, PyObject *more, int type, const char *name) {
    PyArrayObject *others = more == Py_None ? NULL : in_place(more, NPY_INT64, 1, 0, name);
    if ((others == NULL && more != Py_None) || !inside(all, at, slots, name)) return NULL;
    if (others != NULL && PyArray_SIZE(others) < slots)
        return PyErr_Format(PyExc_ValueError, "%s: %zd words are fewer than %zd slots", name, PyArray_SIZE(others), slots);
    PyArrayObject *sums = (PyArrayObject *)PyArray_ZEROS(1, &slots, type, 0);
    for (npy_intp area = 0; sums != NULL && area < all->count; area++) {
        const int64_t *words = serving_area(all, area);
        for (npy_intp i = 0; words != NULL && i < slots; i++) add(sums, type, i, __atomic_load_n(words + at + i, __ATOMIC_RELAXED));
    }
    for (npy_intp i = 0; sums != NULL && others != NULL && i < slots; i++)
        add(sums, type, i, __atomic_load_n(DATA(int64_t, others) + i, __ATOMIC_RELAXED));
    return (PyObject *)sums;
}

/* area_sums(areas, serving, at, slots, more): sums each of the `slots` words from word `at` on, over areas with a nonzero `serving` word,
   and adds `more`, unless it is None. */
KERNEL(area_sums) {
    Areas all;
    if (!arguments("area_sums", count, 5) || !areas_of(&all, args[0], args[1], "area_sums")) return NULL;
    npy_intp at = PyLong_AsSsize_t(args[2]), slots = PyLong_AsSsize_t(args[3]);
    return PyErr_Occurred() ? NULL : sums_of(&all, at, slots, args[4], NPY_INT64, "area_sums");
}

/* area_loads(areas, serving, requests_at, tokens_at, slots, more_requests, more_tokens): returns the sums from `requests_at` on as
   `area_sums` does, and those from `tokens_at` on as float64. */
KERNEL(area_loads) {
    Areas all;
    if (!arguments("area_loads", count, 7) || !areas_of(&all, args[0], args[1], "area_loads")) return NULL;
    npy_intp requests_at = PyLong_AsSsize_t(args[2]), tokens_at = PyLong_AsSsize_t(args[3]), slots = PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred()) return NULL;
    PyObject *requests = sums_of(&all, requests_at, slots, args[5], NPY_INT64, "area_loads"), *tokens = NULL, *both = NULL;
    if (requests != NULL && (tokens = sums_of(&all, tokens_at, slots, args[6], NPY_DOUBLE, "area_loads")) != NULL)
        both = PyTuple_Pack(2, requests, tokens);
    Py_XDECREF(requests);
    Py_XDECREF(tokens);
    return both;
}

/* area_total(areas, serving, at, skipped): returns the sum of one word over the areas that serve, without the area `skipped` (-1: all). */
KERNEL(area_total) {
    Areas all;
    if (!arguments("area_total", count, 4) || !areas_of(&all, args[0], args[1], "area_total")) return NULL;
    npy_intp at = PyLong_AsSsize_t(args[2]), skipped = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred() || !inside(&all, at, 1, "area_total")) return NULL;
    int64_t total = 0;
    for (npy_intp area = 0; area < all.count; area++) {
        const int64_t *words = area == skipped ? NULL : serving_area(&all, area);
        if (words != NULL) total += __atomic_load_n(words + at, __ATOMIC_RELAXED);
    }
    return PyLong_FromLongLong(total);
}

static inline int64_t clipped(int64_t value, int64_t most) { return value < 0 ? 0 : value > most ? most : value; }

#define ROW_BYTES 20 /* key u64, requests u32, tokens u64 */

/* load_rows(areas, serving, places, keys, said, whole, requests_max, tokens_max): returns the packed rows of the endpoints with a load
   that differs from `said`, or with `whole` of those that have any, and notes the load of all in `said`. `places`: int64, shape (n, 2), the
   words of requests and tokens of each endpoint in an area, over which both are summed. `keys`: uint64, shape (n,). `said`: int64, as
   `places`. Numbers are brought into the range from 0 to their maximum. */
KERNEL(load_rows) {
    Areas all;
    if (!arguments("load_rows", count, 8) || !areas_of(&all, args[0], args[1], "load_rows")) return NULL;
    PyArrayObject *places = in_place(args[2], NPY_INT64, 2, 0, "load_rows: places"),
                  *keys = in_place(args[3], NPY_UINT64, 1, 0, "load_rows: keys"),
                  *said = in_place(args[4], NPY_INT64, 2, 1, "load_rows: said");
    if (places == NULL || keys == NULL || said == NULL) return NULL;
    int whole = PyObject_IsTrue(args[5]);
    const int64_t most[2] = {PyLong_AsLongLong(args[6]), PyLong_AsLongLong(args[7])};
    if (PyErr_Occurred()) return NULL;
    npy_intp n = PyArray_SIZE(keys), used = 0;
    if (PyArray_DIM(places, 1) != 2 || PyArray_DIM(said, 1) != 2 || PyArray_DIM(places, 0) != n || PyArray_DIM(said, 0) != n)
        return PyErr_Format(PyExc_ValueError, "load_rows: the arrays differ in length");
    for (npy_intp i = 0; i < 2 * n; i++)
        if (!inside(&all, DATA(int64_t, places)[i], 1, "load_rows")) return NULL;
    char *rows = PyMem_Malloc(n * ROW_BYTES + 1);
    if (rows == NULL) return PyErr_NoMemory();
    for (npy_intp i = 0; i < n; i++) {
        int64_t *before = DATA(int64_t, said) + 2 * i, now[2] = {0, 0};
        for (npy_intp area = 0; area < all.count; area++) {
            const int64_t *words = serving_area(&all, area);
            for (int part = 0; words != NULL && part < 2; part++)
                now[part] += __atomic_load_n(words + DATA(int64_t, places)[2 * i + part], __ATOMIC_RELAXED);
        }
        for (int part = 0; part < 2; part++) now[part] = clipped(now[part], most[part]);
        int told = whole ? now[0] || now[1] : now[0] != before[0] || now[1] != before[1];
        memcpy(before, now, sizeof(now));
        if (!told) continue;
        uint32_t requests = (uint32_t)now[0];
        memcpy(rows + used, DATA(uint64_t, keys) + i, 8);
        memcpy(rows + used + 8, &requests, 4);
        memcpy(rows + used + 12, now + 1, 8);
        used += ROW_BYTES;
    }
    PyObject *result = PyBytes_FromStringAndSize(rows, used);
    PyMem_Free(rows);
    return result;
}

/* increase(words, at, by=1): adds `by` to the word at `at`, from 0. `words`: a memoryview of signed words of 64 bits. */
KERNEL(increase) {
    if (count < 2 || count > 3) return PyErr_Format(PyExc_TypeError, "increase takes 2 or 3 arguments, not %zd", count);
    Py_buffer *words = PyMemoryView_Check(args[0]) ? PyMemoryView_GET_BUFFER(args[0]) : NULL;
    if (words == NULL || words->readonly || words->ndim != 1 || words->strides[0] != 8 || words->format == NULL ||
        (words->format[0] != 'q' && words->format[0] != 'l') || words->itemsize != 8)
        return PyErr_Format(PyExc_TypeError, "increase: needs a writable, contiguous memoryview of signed words");
    Py_ssize_t at = PyLong_AsSsize_t(args[1]), by = count > 2 ? PyLong_AsSsize_t(args[2]) : 1;
    if ((at == -1 || by == -1) && PyErr_Occurred()) return NULL;
    if (at < 0 || at >= words->shape[0]) return PyErr_Format(PyExc_IndexError, "increase: there is no word %zd", at);
    ((int64_t *)words->buf)[at] += by;
    Py_RETURN_NONE;
}

/* raise_to(cells, at, value): sets the cell at `at` to `value` if it is less. `cells`: float64. */
KERNEL(raise_to) {
    if (!arguments("raise_to", count, 3)) return NULL;
    PyArrayObject *cells = in_place(args[0], NPY_DOUBLE, 1, 1, "raise_to");
    if (cells == NULL) return NULL;
    npy_intp at = PyLong_AsSsize_t(args[1]);
    double value = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (at < 0 || at >= PyArray_SIZE(cells)) return PyErr_Format(PyExc_IndexError, "raise_to: there is no cell %zd", at);
    if (value > DATA(double, cells)[at]) DATA(double, cells)[at] = value;
    Py_RETURN_NONE;
}

/* fence(): what stands before the call takes effect before what stands behind it (`shm.fence`). */
KERNEL(fence) {
    (void)args;
    if (!arguments("fence", count, 0)) return NULL;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

/* seal(words): sets the last word so that the XOR of all words is 0. `words`: a memoryview of unsigned words of 64 bits. */
KERNEL(seal) {
    if (!arguments("seal", count, 1)) return NULL;
    Py_buffer *view = PyMemoryView_Check(args[0]) ? PyMemoryView_GET_BUFFER(args[0]) : NULL;
    if (view == NULL || view->readonly || view->ndim != 1 || view->strides[0] != 8 || view->itemsize != 8 ||
        view->format == NULL || view->format[0] != 'Q' || view->shape[0] < 1)
        return PyErr_Format(PyExc_TypeError, "seal: needs a writable, contiguous memoryview of unsigned words");
    uint64_t *words = view->buf, all = 0;
    for (Py_ssize_t i = 0; i + 1 < view->shape[0]; i++) all ^= words[i];
    words[view->shape[0] - 1] = all;
    Py_RETURN_NONE;
}

/* read_rows(rows): returns a copy of the rows, and one word per row, which is not 0 if the row was torn while it was copied. `rows`:
   uint64, shape (n, words). The first word of a row is its version; the last word makes the XOR of all words equal to the version. */
KERNEL(read_rows) {
    if (!arguments("read_rows", count, 1)) return NULL;
    PyArrayObject *rows = in_place(args[0], NPY_UINT64, 2, 0, "read_rows");
    if (rows == NULL) return NULL;
    npy_intp n = PyArray_DIM(rows, 0), width = PyArray_DIM(rows, 1);
    if (width < 1) return PyErr_Format(PyExc_ValueError, "read_rows: a row begins with its version");
    PyArrayObject *copy = (PyArrayObject *)PyArray_EMPTY(2, PyArray_DIMS(rows), NPY_UINT64, 0), *torn = output(n, NPY_UINT64);
    if (copy == NULL || torn == NULL) {
        Py_XDECREF(copy);
        Py_XDECREF(torn);
        return NULL;
    }
    for (npy_intp i = 0; i < n; i++) {
        const uint64_t *row = DATA(uint64_t, rows) + i * width;
        uint64_t *out = DATA(uint64_t, copy) + i * width, all = 0, before = __atomic_load_n(row, __ATOMIC_ACQUIRE);
        for (npy_intp word = 0; word < width; word++) all ^= out[word] = __atomic_load_n(row + word, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        uint64_t after = __atomic_load_n(row, __ATOMIC_RELAXED);
        DATA(uint64_t, torn)[i] = (before ^ after) | (before ^ all) | (before & 1);
    }
    return Py_BuildValue("NN", copy, torn);
}

/* Predicts times to the first token, and fits their coefficients (`epp.learning`). `latency_reference.py` describes the functions. */
#include "arrays.h"

#include <math.h>

enum { BASE, UNCACHED, REST, BUSY, QUEUE, RUNNING, FEATURES };
enum { PLACE_S = FEATURES, OVERDUE_S, SERIAL, IN_TURN, PLACE, SHARP, USUAL_SPEED, USUAL_LIMIT, LEAST_S, MOST_S, BURST, APART,
       LATER, LONG, DISPLACED, CROWDED, FILLED, PARAMETERS };
enum { TIMES, COSTS, TOKENS, AHEAD, ELAPSED, LOAD, MEMORY, ROWS };
#define THOUSAND 1000.0
#define INSTANT 1e-12
#define NEARLY 0.01
#define QUEUE_PER_POINT 8.0
#define FITTED_MAX 8

/* What one endpoint is for one request. */
struct situation {
    double limit, speed, tokens, ahead, elapsed, load, front, sent, memory, displaced, prompt;
};

static void describe(double uncached, double place_s, double overdue_s, const struct situation *s, double *x) {
    x[BASE] = 1.0;
    x[UNCACHED] = s->tokens / THOUSAND;
    x[REST] = x[BUSY] = x[QUEUE] = 0.0;
    x[RUNNING] = s->load;
    if (s->ahead > 0.0) {
        x[REST] = s->ahead / THOUSAND;
        x[BUSY] = 1.0;
        double own = s->speed * uncached;
        if (own > INSTANT) x[REST] = larger(-overdue_s / uncached, x[REST] - s->elapsed / own);
    }
    if (s->limit > 0.0) {
        x[QUEUE] = larger(0.0, s->load - s->limit + 1.0) * place_s / s->limit;
        x[RUNNING] = smaller(s->load, s->limit);
    }
}

static PyObject *list_of(const double *values, int size) {
    PyObject *list = PyList_New(size);
    for (int i = 0; list != NULL && i < size; i++) {
        PyObject *value = PyFloat_FromDouble(values[i]);
        if (value == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, value);
    }
    return list;
}

KERNEL(features) {
    if (!arguments("features", count, 9)) return NULL;
    double v[9], x[FEATURES];
    for (int i = 0; i < 9; i++) v[i] = PyFloat_AsDouble(args[i]);
    if (PyErr_Occurred()) return NULL;
    const struct situation s = {v[3], v[4], v[5], v[6], v[7], v[8], 0.0, 0.0, 0.0, 0.0, 0.0};
    describe(v[0], v[1], v[2], &s, x);
    return list_of(x, FEATURES);
}

static PyObject *unequal(const char *name) {
    return PyErr_Format(PyExc_ValueError, "%s: the arrays differ in length", name);
}

static double sharp(double share, double power) {
    return share == 0.0 && power > 0.0 ? 0.0 : pow(share, power);
}

/* Predicts one endpoint. Writes the ROWS of its column, `n` apart. */
static void predict(const double *p, struct situation *s, double *out, npy_intp n) {
    double x[FEATURES], sum = 0.0;
    if (!(s->memory <= 0.0)) s->elapsed = 0.0; /* prompts that wait for memory are not computed meanwhile */
    if (s->ahead > 0.0 && p[SERIAL] != 0.0 && !(0.0 < s->limit && s->limit <= s->load))
        s->speed = larger(s->speed, s->elapsed / (p[BASE] + p[REST] * s->front / THOUSAND + p[BUSY] + p[LEAST_S]));
    s->elapsed = smaller(s->elapsed, s->speed * (p[UNCACHED] * s->front / THOUSAND + p[OVERDUE_S]));
    describe(p[UNCACHED], p[PLACE_S], p[OVERDUE_S], s, x);
    for (int k = 0; k < FEATURES; k++) sum += p[k] * x[k];
    double own = p[BASE] + p[UNCACHED] * x[UNCACHED], seconds = s->speed * sum;
    s->memory = s->memory > 0.0 ? larger(0.0, s->memory + s->speed * own - seconds) : 0.0;
    seconds += s->memory;
    seconds = seconds == seconds ? larger(p[LEAST_S], smaller(p[MOST_S], seconds)) : p[MOST_S];
    double turn = larger(0.0, s->speed * (p[REST] * x[REST] + p[BUSY] * x[BUSY]));
    double full = s->limit > 0.0 ? larger(0.0, x[RUNNING]) / s->limit : 0.0;
    out[TIMES * n] = seconds;
    double cached = larger(0.0, s->prompt - s->tokens), again = 1.0;
    if (s->prompt > 0.0) again -= cached / s->prompt * (cached < p[LONG] ? cached / p[LONG] : 1.0);
    double cost = seconds + p[IN_TURN] * (turn * again) + p[PLACE] * s->speed * p[UNCACHED] * x[UNCACHED] * sharp(full, p[SHARP]);
    cost += s->displaced;
    double steady = larger(1.0 / p[APART], smaller(p[APART], s->speed));
    out[COSTS * n] = larger(cost, s->speed * own + p[BURST] * steady * s->sent * (own + p[BUSY]));
    out[TOKENS * n] = s->tokens;
    out[AHEAD * n] = s->ahead;
    out[ELAPSED * n] = s->elapsed;
    out[LOAD * n] = s->load;
    out[MEMORY * n] = s->memory;
}

/* Adds to the costs of `n` candidates what long prompts delay later ones. */
static void delay_later(const double *p, double *made, npy_intp n) {
    npy_intp busy = 0;
    for (npy_intp i = 0; i < n; i++) busy += made[AHEAD * n + i] > 0.0;
    double share = n > 0 ? (double)busy / n : 0.0, later = smaller(p[LATER], share / (NEARLY + 1.0 - share));
    for (npy_intp i = 0; i < n; i++) made[COSTS * n + i] += later * p[REST] * larger(0.0, made[TOKENS * n + i] - p[LONG]) / THOUSAND;
}

enum { START, SEEN, LATE, PROMPTS, CELLS }; /* as in compiled.outlook */

/* Returns a cell of a worker and a slot. `starts`: shape (workers, CELLS, slots). */
static double *start_cell(PyArrayObject *starts, npy_intp worker, int cell, npy_intp slot) {
    return DATA(double, starts) + (worker * CELLS + cell) * PyArray_DIM(starts, 2) + slot;
}

/* Returns the newest start of a slot, 0 if there is none. Workers write the starts meanwhile. */
static double newest(PyArrayObject *starts, npy_intp slot) {
    double begun = 0.0;
    if (slot < 0 || slot >= PyArray_DIM(starts, 2)) return 0.0;
    for (npy_intp worker = 0; worker < PyArray_DIM(starts, 0); worker++) begun = larger(begun, *start_cell(starts, worker, START, slot));
    return begun;
}

/* Returns how many of the tokens ahead were there at the newest start, `begun`; all if nothing else is known. */
static double at_front(PyArrayObject *starts, npy_intp slot, double begun, double ahead) {
    double front = ahead;
    if (begun <= 0.0) return ahead;
    for (npy_intp worker = 0; worker < PyArray_DIM(starts, 0); worker++)
        if (*start_cell(starts, worker, SEEN, slot) == begun) front -= *start_cell(starts, worker, LATE, slot);
    return front > 0.0 ? front : ahead;
}

/* Returns how many of the tokens ahead are of prompts that wait, if so many of those prompts do; all if their number is not known. */
static double at_back(PyArrayObject *starts, npy_intp slot, double waited, double ahead) {
    double prompts = 0.0;
    if (!(waited > 0.0)) return 0.0;
    if (slot >= 0 && slot < PyArray_DIM(starts, 2))
        for (npy_intp worker = 0; worker < PyArray_DIM(starts, 0); worker++) prompts += *start_cell(starts, worker, PROMPTS, slot);
    return prompts > waited ? ahead * waited / prompts : ahead;
}

static PyArrayObject *starts_of(PyObject *object, int written, const char *name) {
    PyArrayObject *starts = in_place(object, NPY_DOUBLE, 3, written, name);
    if (starts != NULL && PyArray_DIM(starts, 1) != CELLS) {
        PyErr_Format(PyExc_ValueError, "%s: starts have %d cells", name, CELLS);
        return NULL;
    }
    return starts;
}

KERNEL(follow) {
    if (!arguments("follow", count, 4)) return NULL;
    PyArrayObject *starts = starts_of(args[0], 1, "follow");
    if (starts == NULL) return NULL;
    npy_intp worker = PyLong_AsSsize_t(args[1]), slot = PyLong_AsSsize_t(args[2]);
    double tokens = PyFloat_AsDouble(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (worker < 0 || worker >= PyArray_DIM(starts, 0) || slot < 0 || slot >= PyArray_DIM(starts, 2))
        return PyErr_Format(PyExc_IndexError, "follow: there is no cell %zd, %zd", worker, slot);
    double begun = newest(starts, slot), *seen = start_cell(starts, worker, SEEN, slot), *late = start_cell(starts, worker, LATE, slot);
    if (*seen != begun) {
        *late = 0.0; /* first: a reader of the new start must not find the old tokens */
        *seen = begun;
    }
    *late += tokens;
    Py_RETURN_NONE;
}

KERNEL(first_tokens) {
    if (!arguments("first_tokens", count, 17)) return NULL;
    enum { P, SPEEDS, LIMITS, COMPUTED, SLOTS, HELD, SENT, INFLIGHT, BEFORE, RAN, WAITED, USAGE, ROOM, ARRAYS };
    PyObject *const given[ARRAYS] = {args[0],  args[1],  args[2],  args[3],  args[6],  args[8], args[10],
                                     args[11], args[12], args[13], args[14], args[15], args[16]};
    double now = PyFloat_AsDouble(args[5]), prompt = PyFloat_AsDouble(args[7]), each = PyFloat_AsDouble(args[9]);
    if (PyErr_Occurred()) return NULL;
    PyArrayObject *a[ARRAYS] = {NULL}, *made = NULL, *starts = starts_of(args[4], 0, "first_tokens");
    if (starts == NULL) return NULL;
    for (int i = 0; i < ARRAYS; i++) {
        if (i == HELD && given[i] == Py_None) continue;
        a[i] = i == SLOTS ? input(given[i], NPY_INTP) : i == SENT || i == INFLIGHT ? loads(given[i]) : input(given[i], NPY_DOUBLE);
        if (a[i] == NULL) goto end;
    }
    npy_intp n = PyArray_SIZE(a[SLOTS]), known = PyArray_SIZE(a[SPEEDS]), shape[2] = {ROWS, n};
    int fits = PyArray_SIZE(a[P]) == PARAMETERS && PyArray_SIZE(a[LIMITS]) == known && PyArray_SIZE(a[COMPUTED]) == known;
    for (int i = SLOTS; i < ARRAYS; i++) fits = fits && (a[i] == NULL || PyArray_SIZE(a[i]) == n);
    if (!fits) {
        unequal("first_tokens");
        goto end;
    }
    if ((made = (PyArrayObject *)PyArray_EMPTY(2, shape, NPY_DOUBLE, 0)) == NULL) goto end;
    const double *p = DATA(double, a[P]);
    for (npy_intp i = 0; i < n; i++) {
        npy_intp slot = DATA(npy_intp, a[SLOTS])[i];
        int here = slot >= 0 && slot < known;
        double inflight = load_at(a[INFLIGHT], i), blocks = a[HELD] == NULL ? 0.0 : DATA(double, a[HELD])[i];
        struct situation s = {
            .limit = here ? DATA(double, a[LIMITS])[slot] : p[USUAL_LIMIT],
            .speed = here ? DATA(double, a[SPEEDS])[slot] : p[USUAL_SPEED],
            .tokens = larger(0.0, prompt - blocks * each),
            .ahead = larger(0.0, load_at(a[SENT], i)),
            .load = larger(inflight,
                           DATA(double, a[RAN])[i] + DATA(double, a[WAITED])[i] + inflight - DATA(double, a[BEFORE])[i]),
            .sent = larger(0.0, inflight - DATA(double, a[BEFORE])[i]),
            .prompt = prompt,
        };
        double holds = DATA(double, a[ROOM])[i], waited = DATA(double, a[WAITED])[i] + inflight - DATA(double, a[BEFORE])[i];
        double used = DATA(double, a[USAGE])[i], needed = used * holds + at_back(starts, slot, waited, s.ahead) + prompt;
        if (holds > 0.0) {
            s.memory = p[PLACE_S] * larger(0.0, needed - holds) / holds;
            s.displaced = p[DISPLACED] * p[PLACE_S] * s.tokens / holds * sharp(larger(0.0, used), p[SHARP]);
            double computed = here ? DATA(double, a[COMPUTED])[slot] : 0.0;
            if (p[SERIAL] == 0.0 && computed >= p[FILLED] * holds)
                s.displaced += p[DISPLACED] * s.speed * p[UNCACHED] * s.tokens / THOUSAND;
        }
        double begun = s.ahead > 0.0 ? newest(starts, slot) : 0.0;
        s.elapsed = begun > 0.0 ? larger(0.0, now - begun) : 0.0;
        s.front = used > p[CROWDED] ? s.ahead : at_front(starts, slot, begun, s.ahead);
        predict(p, &s, DATA(double, made) + i, n);
    }
    delay_later(p, DATA(double, made), n);
end:
    for (int i = 0; i < ARRAYS; i++) Py_XDECREF(a[i]);
    return (PyObject *)made;
}

/* Copies what `first_tokens` found at one candidate. Returns 0 with an exception if there is none. */
static int found_at(PyObject *object, PyObject *at, double *values, const char *name) {
    PyArrayObject *outlook = in_place(object, NPY_DOUBLE, 2, 0, name);
    Py_ssize_t index = PyLong_AsSsize_t(at);
    if (outlook == NULL || PyErr_Occurred()) return 0;
    npy_intp rows = PyArray_DIM(outlook, 0), n = PyArray_DIM(outlook, 1);
    if (rows != ROWS || index < 0 || index >= n) {
        PyErr_Format(PyExc_IndexError, "%s: there is no candidate %zd", name, index);
        return 0;
    }
    for (int row = 0; row < ROWS; row++) values[row] = DATA(double, outlook)[row * n + index];
    return 1;
}

/* column(outlook, index): returns what `first_tokens` found at one candidate, as a list of floats. */
KERNEL(column) {
    double values[ROWS];
    if (!arguments("column", count, 2) || !found_at(args[0], args[1], values, "column")) return NULL;
    return list_of(values, ROWS);
}

/* cell(outlook, row, index): returns one number of the column. */
KERNEL(cell) {
    double values[ROWS];
    if (!arguments("cell", count, 3) || !found_at(args[0], args[2], values, "cell")) return NULL;
    Py_ssize_t row = PyLong_AsSsize_t(args[1]);
    if (row == -1 && PyErr_Occurred()) return NULL;
    if (row < 0 || row >= ROWS) return PyErr_Format(PyExc_IndexError, "cell: there is no row %zd", row);
    return PyFloat_FromDouble(values[row]);
}

KERNEL(careful) {
    if (!arguments("careful", count, 9)) return NULL;
    enum { INFLIGHT, BEFORE, SCRAPED, RAN, USAGE, ARRAYS };
    double point = PyFloat_AsDouble(args[0]), points = PyFloat_AsDouble(args[1]), prompt = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return NULL;
    PyArrayObject *a[ARRAYS] = {NULL}, *made = NULL, *outlook = in_place(args[3], NPY_DOUBLE, 2, 0, "careful: outlook");
    if (outlook == NULL) return NULL;
    npy_intp n = PyArray_DIM(outlook, 1);
    int fits = PyArray_DIM(outlook, 0) == ROWS;
    for (int i = 0; i < ARRAYS; i++) {
        if ((a[i] = i == INFLIGHT ? loads(args[4]) : input(args[4 + i], NPY_DOUBLE)) == NULL) goto end;
        fits = fits && PyArray_SIZE(a[i]) == n;
    }
    if (!fits) {
        unequal("careful");
        goto end;
    }
    if ((made = output(n, NPY_DOUBLE)) == NULL) goto end;
    const double *ran = DATA(double, a[RAN]), *usage = DATA(double, a[USAGE]);
    const double *tokens = DATA(double, outlook) + TOKENS * n, *ahead = DATA(double, outlook) + AHEAD * n;
    double *costs = DATA(double, made); /* first the requests that wait, then the costs */
    for (npy_intp i = 0; i < n; i++)
        costs[i] = waiting_now(load_at(a[INFLIGHT], i), DATA(double, a[BEFORE])[i], DATA(double, a[SCRAPED])[i]);
    struct range waits = range_of(costs, n), runs = range_of(ran, n);
    double each = 1.0 + point / larger(1.0, prompt);
    for (npy_intp i = 0; i < n; i++) {
        double lacks = points - below(waits, costs[i]) - below(runs, ran[i]) + usage[i] + costs[i] / QUEUE_PER_POINT;
        costs[i] = point * lacks + tokens[i] * each + ahead[i];
    }
end:
    for (int i = 0; i < ARRAYS; i++) Py_XDECREF(a[i]);
    return (PyObject *)made;
}

KERNEL(cheapest) {
    if (!arguments("cheapest", count, 5)) return NULL;
    double near = PyFloat_AsDouble(args[2]), least = PyFloat_AsDouble(args[3]), part = PyFloat_AsDouble(args[4]);
    if (PyErr_Occurred()) return NULL;
    PyArrayObject *scores = NULL, *load = NULL, *costs = input(args[0], NPY_DOUBLE);
    if (costs == NULL || (load = loads(args[1])) == NULL) goto end;
    npy_intp n = PyArray_SIZE(costs);
    if (PyArray_SIZE(load) != n) {
        unequal("cheapest");
        goto end;
    }
    if ((scores = output(n, NPY_DOUBLE)) == NULL) goto end;
    const double *c = DATA(double, costs);
    double *s = DATA(double, scores), low = NAN, high = -INFINITY;
    for (npy_intp i = 0; i < n; i++) {
        if (c[i] < low || low != low) low = c[i];
        if (load_at(load, i) > high || load_at(load, i) != load_at(load, i)) high = load_at(load, i);
    }
    double limit = low + larger(least, near * low), more = part / (1.0 + high);
    for (npy_intp i = 0; i < n; i++)
        s[i] = part > 0.0 && c[i] <= limit ? 1.0 - more * load_at(load, i) : (part > 0.0 ? 1.0 - part : 1.0) * low / c[i];
end:
    Py_XDECREF(costs);
    Py_XDECREF(load);
    return (PyObject *)scores;
}

/* Moves each ratio to its best value given the others. */
static void sweep(double *ratio, const double *moments, const double *products, npy_intp size, double weight, long bounded, long bound) {
    for (npy_intp k = 0; k < size; k++) {
        double own = products[k * size + k], before = 0.0;
        for (npy_intp j = 0; j < size; j++) before += products[k * size + j] * ratio[j];
        double rest = moments[k] + weight - before;
        ratio[k] = larger(0.0, (rest + own * ratio[k]) / (own + weight));
        if (k == bounded) ratio[k] = smaller(ratio[k], ratio[bound]);
    }
}

KERNEL(fit) {
    if (!arguments("fit", count, 11)) return NULL;
    PyArrayObject *sums = in_place(args[0], NPY_DOUBLE, 1, 1, "fit: sums"), *priors = in_place(args[1], NPY_DOUBLE, 1, 0, "fit: prior");
    if (sums == NULL || priors == NULL) return NULL;
    double v[6], values[FITTED_MAX], theta[FITTED_MAX], shares[FITTED_MAX];
    for (int i = 0; i < 6; i++) v[i] = PyFloat_AsDouble(args[3 + i]);
    long bounded = PyLong_AsLong(args[9]), bound = PyLong_AsLong(args[10]);
    if (PyErr_Occurred()) return NULL;
    const double observed = v[0], floor = v[1], keep = v[2], most = v[3], share_max = v[4], weight = v[5];
    npy_intp size = PyArray_SIZE(priors);
    if (!PyList_Check(args[2]) || PyList_GET_SIZE(args[2]) != size || size > FITTED_MAX || PyArray_SIZE(sums) != size * (size + 2) ||
        bounded >= size || bound >= size)
        return unequal("fit");
    const double *prior = DATA(double, priors);
    double *ratio = DATA(double, sums), *moments = ratio + size, *products = moments + size, predicted = 0.0;
    for (npy_intp k = 0; k < size; k++) {
        values[k] = PyFloat_AsDouble(PyList_GET_ITEM(args[2], k));
        predicted += ratio[k] * prior[k] * values[k];
    }
    if (PyErr_Occurred()) return NULL;
    double expected = larger(floor, predicted), target = smaller(observed / expected, most);
    for (npy_intp k = 0; k < size; k++) shares[k] = smaller(share_max, values[k] * prior[k] / expected);
    for (npy_intp k = 0; k < size; k++) {
        moments[k] = keep * moments[k] + shares[k] * target;
        for (npy_intp j = 0; j < size; j++) products[k * size + j] = keep * products[k * size + j] + shares[k] * shares[j];
    }
    sweep(ratio, moments, products, size, weight, bounded, bound < 0 ? 0 : bound);
    for (npy_intp k = 0; k < size; k++) theta[k] = ratio[k] * prior[k];
    return list_of(theta, (int)size);
}

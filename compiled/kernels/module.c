/* Defines the module `compiled.kernels.native`. Nearly all functions have a counterpart in Python with the same name and the same results, in
   `compiled/kernels/*reference.py`. */
#define EPP_KERNELS_MODULE
#include "arrays.h"

#define FUNCTIONS(each)                                                                                                      \
    each(add_scaled) each(answers) each(by_row) each(careful) each(carry) each(cell) each(chain) each(cheapest) each(column)             \
    each(copied) each(data_header) each(features) each(fence) each(fewest) each(find) each(first_tokens) each(fit)           \
    each(flat_end) each(follow) each(forget) each(framed_message) each(free_oldest) each(header) each(header_values) each(held) each(highest) \
    each(increase) each(insert) each(is_uuid) each(items) each(area_loads) each(area_sums) each(area_total)                  \
    each(load_rows) each(match) each(mean_pressure) each(members) each(mentions) each(merge_loads) each(numbered)            \
    each(observe) each(observe_each) each(owned) each(plain_head) each(prefills_under_way) each(raise_to) each(read_rows)    \
    each(recall) each(remove_links) each(reused) each(seal) each(share) each(show_prefill) each(step) each(store_links)      \
    each(token_load) each(waiting)

#define DECLARED(name) KERNEL(name);
FUNCTIONS(DECLARED)

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL},
static PyMethodDef methods[] = {FUNCTIONS(METHOD){NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native(void) {
    import_array();
    return PyModule_Create(&definition);
}

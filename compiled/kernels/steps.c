/* Steps coroutines without StopIteration, which costs several times as much as the step: an exception, its traceback and its frame. */
#include "arrays.h"

/* step(coroutine): runs a coroutine until it waits or ends. Returns (False, what it waits for) or (True, its result). */
KERNEL(step) {
    if (!arguments("step", count, 1)) return NULL;
    PyObject *value;
    PySendResult state = PyIter_Send(args[0], Py_None, &value);
    if (state == PYGEN_ERROR) return NULL;
    return Py_BuildValue("ON", state == PYGEN_RETURN ? Py_True : Py_False, value);
}

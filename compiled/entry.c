// The entry to the compiled modules. mypyc puts the code of all modules into one library, and a function for each that makes the module, as
// a capsule. Here is the module that calls such a function, so that the modules need no files of their own.
#include <Python.h>

static PyObject *made(PyObject *Py_UNUSED(self), PyObject *capsule)
{
    PyObject *(*make)(void) = (PyObject * (*)(void)) PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
    return make ? make() : NULL;
}

static PyMethodDef methods[] = {
    {"made", made, METH_O, "made(capsule)\n--\n\nReturn the module that the function in this capsule makes."},
    {NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "compiled.entry", NULL, -1, methods};

PyMODINIT_FUNC PyInit_entry(void)
{
    return PyModule_Create(&definition);
}

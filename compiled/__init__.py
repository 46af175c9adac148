"""The compiled form of the request path: which modules belong to it, how they are built, and how Python finds them.

`modules` lists the modules. `build` compiles the modules with mypyc from their ordinary source. `finder` imports the result in place of the
source. Without a build, the same source runs interpreted, with the same behaviour. `kernels` has loops over numbers in C.
"""

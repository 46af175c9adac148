"""Kernels: small loops over numbers and bytes. The kernels run in C if the request path is compiled (`*.c` here), else in Python
(`*reference.py`).

Both have the same results; `tests/compiled` compares them. For eight endpoints, a NumPy expression costs 1 to 8 µs, mostly for the calls of
NumPy; a kernel in C costs 0.1 µs. A kernel checks its arguments: it copies arrays that are not contiguous or have another type, and never
writes outside an array. `NATIVE` says whether the kernels in C run. Three kernels have no reference here, so check `NATIVE` before calling
`chain`, `fence` or `read_rows`. Without a C compiler, code beside those calls does their work, in `epp/prefix/blocks.py` and in `shm`.
"""

from compiled.finder import choose

NATIVE: bool = choose().compiled

if NATIVE:
    from compiled.kernels.native import *  # noqa: F403
else:
    from compiled.kernels.areas_reference import *  # noqa: F403
    from compiled.kernels.index_reference import *  # noqa: F403
    from compiled.kernels.latency_reference import *  # noqa: F403
    from compiled.kernels.links_reference import *  # noqa: F403
    from compiled.kernels.loads_reference import *  # noqa: F403
    from compiled.kernels.reference import *  # noqa: F403

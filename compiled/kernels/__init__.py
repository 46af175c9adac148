"""Kernels: small loops over arrays of numbers. They run in C if the request path is compiled (`*.c` here), else in NumPy (`reference`).

Both have the same results; `tests/compiled/test_kernels.py` compares them. For eight endpoints, a NumPy expression costs 1 to 8 µs, most of
which is the cost of calls, and a kernel in C costs 0.1 µs. A kernel checks its arguments: it copies arrays that are not contiguous or have
another type, and never writes outside an array. `NATIVE` says whether the kernels in C run. The kernels for the index, links, chains of
hashes and histograms exist only in C: check `NATIVE` before calling them. The Python code that does their work without a C compiler is
beside the calls, in `shm` and in `epp/prefix/blocks.py`.

May import: numpy. Imported by: everything that computes over endpoints, lanes or hashes.
"""

from compiled.finder import choose

NATIVE = choose().compiled

if NATIVE:
    from compiled.kernels.native import (
        add_scaled,
        by_row,
        chain,
        fence,
        fewest,
        find,
        forget,
        held,
        highest,
        increase,
        insert,
        lane_sums,
        load_rows,
        match,
        observe,
        read_rows,
        remove_links,
        share,
        store_links,
        token_load,
        waiting,
    )
else:
    from compiled.kernels.reference import (
        add_scaled,
        by_row,
        fewest,
        find,
        highest,
        increase,
        share,
        token_load,
        waiting,
    )

__all__ = (
    "NATIVE",
    "add_scaled",
    "by_row",
    "chain",
    "fence",
    "fewest",
    "find",
    "forget",
    "held",
    "highest",
    "increase",
    "insert",
    "lane_sums",
    "load_rows",
    "match",
    "observe",
    "read_rows",
    "remove_links",
    "share",
    "store_links",
    "token_load",
    "waiting",
)

"""Kernels: small loops over numbers and bytes. They run in C if the request path is compiled (`*.c` here), else in Python
(`reference`, `latency_reference`).

Both have the same results; `tests/compiled` compares them. For eight endpoints, a NumPy expression costs 1 to 8 µs, most of which is the
cost of calls, and a kernel in C costs 0.1 µs. A kernel checks its arguments: it copies arrays that are not contiguous or have another
type, and never writes outside an array. `NATIVE` says whether the kernels in C run. The kernels for the index, links, chains of hashes,
histograms, prefills, JSON and pages exist only in C: check `NATIVE` before calling them. The Python code that does their work without a C
compiler is beside the calls, in `shm`, `epp/prefix/blocks.py`, `epp/plugins/parsers/_reader.py`, `epp/protocol/exposition.py` and
`workers/endpoints/http_answer.py`.

May import: numpy. Imported by: everything that computes over endpoints, lanes, hashes or bytes.
"""

from compiled.finder import choose

NATIVE: bool = choose().compiled

if NATIVE:
    from compiled.kernels.native import (
        add_scaled,
        by_row,
        careful,
        cell,
        chain,
        cheapest,
        column,
        features,
        fence,
        fewest,
        find,
        first_tokens,
        fit,
        flat_end,
        forget,
        framed_message,
        free_oldest,
        held,
        highest,
        increase,
        insert,
        is_uuid,
        items,
        lane_loads,
        lane_sums,
        lane_total,
        load_rows,
        match,
        members,
        mentions,
        observe,
        owned,
        plain_head,
        prefills_under_way,
        read_rows,
        recall,
        remove_links,
        seal,
        share,
        show_prefill,
        step,
        store_links,
        token_load,
        waiting,
    )
else:
    from compiled.kernels.latency_reference import careful, cell, cheapest, column, features, first_tokens, fit
    from compiled.kernels.reference import (
        add_scaled,
        by_row,
        fewest,
        find,
        flat_end,
        framed_message,
        highest,
        increase,
        is_uuid,
        mentions,
        seal,
        share,
        step,
        token_load,
        waiting,
    )

__all__ = (
    "NATIVE",
    "add_scaled",
    "by_row",
    "careful",
    "cell",
    "chain",
    "cheapest",
    "column",
    "features",
    "fence",
    "fewest",
    "find",
    "first_tokens",
    "fit",
    "flat_end",
    "forget",
    "framed_message",
    "free_oldest",
    "held",
    "highest",
    "increase",
    "insert",
    "is_uuid",
    "items",
    "lane_loads",
    "lane_sums",
    "lane_total",
    "load_rows",
    "match",
    "members",
    "mentions",
    "observe",
    "owned",
    "plain_head",
    "prefills_under_way",
    "read_rows",
    "recall",
    "remove_links",
    "seal",
    "share",
    "show_prefill",
    "step",
    "store_links",
    "token_load",
    "waiting",
)

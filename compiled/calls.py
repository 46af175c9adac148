"""The kernels that run several times per request, as constants of a compiled module.

Compiled code calls a constant of another compiled module directly. It would look up the name of another module's function at each call.
The kernels that exist only in C are None if they were not built.
"""

from typing import Final

from compiled import kernels

find: Final = kernels.find
flat_end: Final = kernels.flat_end
framed_message: Final = kernels.framed_message
increase: Final = kernels.increase
is_uuid: Final = kernels.is_uuid
items: Final = kernels.items if kernels.NATIVE else None
members: Final = kernels.members if kernels.NATIVE else None
mentions: Final = kernels.mentions
seal: Final = kernels.seal
step: Final = kernels.step
waiting: Final = kernels.waiting
careful: Final = kernels.careful
cell: Final = kernels.cell
cheapest: Final = kernels.cheapest
column: Final = kernels.column
features: Final = kernels.features
first_tokens: Final = kernels.first_tokens
fit: Final = kernels.fit
chain: Final = kernels.chain if kernels.NATIVE else None
lane_loads: Final = kernels.lane_loads if kernels.NATIVE else None
lane_sums: Final = kernels.lane_sums if kernels.NATIVE else None
lane_total: Final = kernels.lane_total if kernels.NATIVE else None
load_rows: Final = kernels.load_rows if kernels.NATIVE else None
match: Final = kernels.match if kernels.NATIVE else None
observe: Final = kernels.observe if kernels.NATIVE else None
plain_head: Final = kernels.plain_head if kernels.NATIVE else None
prefills_under_way: Final = kernels.prefills_under_way if kernels.NATIVE else None
recall: Final = kernels.recall if kernels.NATIVE else None
show_prefill: Final = kernels.show_prefill if kernels.NATIVE else None

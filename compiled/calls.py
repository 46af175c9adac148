"""The kernels that run several times per request, as constants of a compiled module.

Compiled code calls a constant of another compiled module directly. It would look up the name of another module's function at each call.
The kernels that exist only in C are None if they were not built.
"""

from typing import Final

from compiled import kernels

add_scaled: Final = kernels.add_scaled
by_row: Final = kernels.by_row
careful: Final = kernels.careful
cell: Final = kernels.cell
cheapest: Final = kernels.cheapest
column: Final = kernels.column
copied: Final = kernels.copied
data_header: Final = kernels.data_header
features: Final = kernels.features
fewest: Final = kernels.fewest
find: Final = kernels.find
first_tokens: Final = kernels.first_tokens
fit: Final = kernels.fit
flat_end: Final = kernels.flat_end
framed_message: Final = kernels.framed_message
header: Final = kernels.header
highest: Final = kernels.highest
increase: Final = kernels.increase
is_uuid: Final = kernels.is_uuid
mean_pressure: Final = kernels.mean_pressure
mentions: Final = kernels.mentions
numbered: Final = kernels.numbered
raise_to: Final = kernels.raise_to
reused: Final = kernels.reused
seal: Final = kernels.seal
share: Final = kernels.share
step: Final = kernels.step
token_load: Final = kernels.token_load
waiting: Final = kernels.waiting

answers: Final = kernels.answers if kernels.NATIVE else None
chain: Final = kernels.chain if kernels.NATIVE else None
items: Final = kernels.items if kernels.NATIVE else None
lane_loads: Final = kernels.lane_loads if kernels.NATIVE else None
lane_sums: Final = kernels.lane_sums if kernels.NATIVE else None
lane_total: Final = kernels.lane_total if kernels.NATIVE else None
load_rows: Final = kernels.load_rows if kernels.NATIVE else None
match: Final = kernels.match if kernels.NATIVE else None
members: Final = kernels.members if kernels.NATIVE else None
merge_loads: Final = kernels.merge_loads if kernels.NATIVE else None
observe: Final = kernels.observe if kernels.NATIVE else None
observe_each: Final = kernels.observe_each if kernels.NATIVE else None
plain_head: Final = kernels.plain_head if kernels.NATIVE else None
prefills_under_way: Final = kernels.prefills_under_way if kernels.NATIVE else None
recall: Final = kernels.recall if kernels.NATIVE else None
show_prefill: Final = kernels.show_prefill if kernels.NATIVE else None

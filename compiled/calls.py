"""The kernels that run several times per request, as constants of a compiled module.

Compiled code calls a constant of another compiled module directly. To call a function of another module, compiled code would look up the
function's name at each call.
"""

from typing import Final

from compiled import kernels

add_scaled: Final = kernels.add_scaled
answers: Final = kernels.answers
by_row: Final = kernels.by_row
careful: Final = kernels.careful
carry: Final = kernels.carry
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
follow: Final = kernels.follow
framed_message: Final = kernels.framed_message
header: Final = kernels.header
header_values: Final = kernels.header_values
highest: Final = kernels.highest
increase: Final = kernels.increase
is_uuid: Final = kernels.is_uuid
items: Final = kernels.items
area_loads: Final = kernels.area_loads
area_sums: Final = kernels.area_sums
area_total: Final = kernels.area_total
load_rows: Final = kernels.load_rows
match: Final = kernels.match
mean_pressure: Final = kernels.mean_pressure
members: Final = kernels.members
mentions: Final = kernels.mentions
merge_loads: Final = kernels.merge_loads
numbered: Final = kernels.numbered
observe: Final = kernels.observe
observe_each: Final = kernels.observe_each
plain_head: Final = kernels.plain_head
prefills_under_way: Final = kernels.prefills_under_way
raise_to: Final = kernels.raise_to
recall: Final = kernels.recall
reused: Final = kernels.reused
seal: Final = kernels.seal
share: Final = kernels.share
show_prefill: Final = kernels.show_prefill
step: Final = kernels.step
token_load: Final = kernels.token_load
waiting: Final = kernels.waiting

# None if the kernels were not built; then the Python code for short blocks also hashes long ones.
chain: Final = kernels.chain if kernels.NATIVE else None

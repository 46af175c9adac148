"""The domain core of the endpoint picker: request in, decision out.

It does no I/O, reads no clock and opens no file. Time, futures and bytes come in as arguments.
Start reading at `decision/decide.py`.
Packages import only from packages further right in this order: config > decision > plugins > flow, prefix, protocol > points > endpoints,
learning, recording, request > metrics. For some of their modules, `EPP` in tests/layers.py names another place in this order.
"""

from compiled.finder import choose

choose()

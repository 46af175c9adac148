"""The domain core of the endpoint picker: request in, decision out.

It does no I/O, reads no clock and opens no file. Time, futures and bytes come in as arguments.
Start reading at `decision/decide.py`.
May import: compiled. Imported by: workers; loadtest.
"""

from compiled.finder import choose

choose()

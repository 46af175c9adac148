"""What a recording of a picker's traffic contains, and how its parts are encoded: pure code without files, processes or clocks.

records    the records, and their msgpack form                              documented in docs/recording.md
batches    batches of records, cut into packets for the pipe to the supervisor
keys       keyed hashes in the place of names
trace      the records of a recording, joined to requests with outcomes
imports    public trace formats, as requests
"""

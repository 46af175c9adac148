"""The live view of a running picker: shared memory -> looks -> figures -> a table or JSON.

    source    attaches read-only and takes looks
    figures   what one look says and what has changed since the one before; pure
    view      figures as text for a terminal
    terminal  the wait between two looks: a key, a signal, or the time

Nothing here writes to the picker's memory, takes a lock or asks one of its processes.
"""

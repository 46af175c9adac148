"""Shows a running picker live: shared memory -> looks -> figures -> a table or JSON. A *look* is one copy of the shared memory.

    source    attaches read-only and takes looks
    figures   computes figures from one look and the look before it; pure
    view      formats figures as text for a terminal
    terminal  waits between two looks: for the time, a key or a signal

This package does not write to the picker's memory, takes no lock, and contacts no process of the picker.
"""

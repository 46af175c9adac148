"""Shows a running picker live, as a table or JSON. `workers.supervisor.pages.state` computes these figures, and the figures of
`/debug/state`.

    command   takes looks at intervals and prints their figures
    view      formats figures as text for a terminal
    terminal  waits between two looks: for the time, a key or a signal

This package does not write to the picker's memory, takes no lock, and contacts no process of the picker.
"""

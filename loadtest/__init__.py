"""The laboratory: everything that runs beside a picker.

sim/     simulated model servers              load/    a driver of ext_proc streams, users of locust
demo/    one command that shows the picker    replay/  recordings in virtual time
tune/    search for better weights            sizing/  cores, memory and flags for a load
"""

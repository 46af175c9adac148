"""`epp record replay`: runs the arrivals of a recording in virtual time, through the decision code of workers.

fit.py        what a recording says about each model server: prefill and decode speed, slots, size of the cache
servers.py    a model server with these values
run.py        arrivals, decisions and servers in virtual time
figures.py    figures of a run, or of what was recorded; the condition of --fail-if
command.py    the command
"""

"""`epp record tune`: finds weights and parameters that serve recorded traffic better.

space.py      which values of a configuration may change, and between which limits
search.py     replays of the training part of a recording, led by optuna
confirm.py    the held-out part: is the best candidate better by more than chance?
command.py    the command
"""

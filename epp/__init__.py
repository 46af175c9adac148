"""The domain core of the endpoint picker: request in, decision out.

Nothing here reads a clock, opens anything or knows how bytes travel; time, futures and bytes come in as arguments.
Start reading at `decide.py`.
"""

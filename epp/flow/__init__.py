"""Flow control: which requests wait, which one is dispatched next, and which ones are refused. Start reading in `controller`.

Time and futures come in as arguments. The queues of other workers are visible through `ports`.
"""

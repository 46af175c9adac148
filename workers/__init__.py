"""The processes of the picker, and everything that uses the operating system or the network: sockets, files, signals, forks, Kubernetes.

Start reading at `process/parent.py` (which process starts which) and `worker/main.py` (how a worker serves streams).
Packages import only from packages further right in this order: cli > supervisor > worker > process > replicas > shared > transport > host.
The packages in supervisor and worker have an order, too: `WORKERS` in tests/layers.py.
"""

from compiled.finder import choose

choose()

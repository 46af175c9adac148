"""The processes of the picker, and everything that uses the operating system or the network: sockets, files, signals, forks, Kubernetes.

Start reading at `process/parent.py` (which process starts which) and `worker/main.py` (how a worker serves streams).
Packages import only from packages further right in this order: cli > supervisor > worker > kv_events > kube > pages > extproc > process >
endpoints > flow > telemetry > shared > transport > host.
May import: epp, shm and compiled. Imported by: no package; it is the program.
"""

from compiled.finder import choose

choose()

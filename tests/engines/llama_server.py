"""Serves a GGUF file with llama.cpp. Runs in the engines' environment: `python llama_server.py FILE PORT`."""

import signal
import sys

import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.model_alias = "tiny"
parameters.hostnames = ["127.0.0.1"]
parameters.port = int(sys.argv[2])
parameters.endpoint_metrics = True
parameters.n_ctx = 8192
parameters.n_parallel = 4
parameters.cpuparams.n_threads = 1
server = xllamacpp.Server(parameters)
print(server.listening_address, flush=True)
signal.pause()

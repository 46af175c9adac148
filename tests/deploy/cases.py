"""Values for which all renderers must agree. Each case turns something on, or changes it."""

from typing import Any

Json = dict[str, Any]

SERVERS: Json = {"router": {"modelServers": {"matchLabels": {"app": "vllm", "app.kubernetes.io/part-of": "models"}}}}


def values(**router: Any) -> Json:
    """Values with these sections of `router`, and with model servers."""
    servers = SERVERS["router"]["modelServers"] | router.pop("modelServers", {})
    return {"router": {"modelServers": servers, **router}}


CASES: dict[str, Json] = {
    "gateway": values(),
    "standalone": values(mode="standalone"),
    "standalone with a pool": values(mode="standalone", inferencePool={"create": True, "failureMode": "FailClose"}),
    "an existing pool": values(inferencePool={"create": False}, modelServers={"matchLabels": {}}),
    "leader election": values(epp={"replicas": 3}),
    "a single replica with leader election": values(mode="standalone", epp={"flags": {"ha-enable-leader-election": True}}),
    "active-active": values(
        epp={"replicas": 2, "flags": {"ha-enable-leader-election": False}, "podDisruptionBudget": {"maxUnavailable": "50%"}}
    ),
    "replicas that act as one": values(epp={"replicas": 3, "replicaStore": {"url": "redis://valkey:6379/0"}}),
    "a replica store with password and TLS": values(
        epp={
            "replicas": 3,
            "replicaStore": {
                "url": "rediss://picker@valkey.example:6380?cluster=true",
                "existingSecret": "store",
                "tls": {"existingSecret": "store-tls", "clientCertificate": True},
            },
        },
        networkPolicy={"restrictEgress": True},
    ),
    "a replica store behind Sentinel": values(
        epp={
            "replicas": 2,
            "replicaStore": {"url": "redis+sentinel://a:26379,b:26380/main", "tls": {"existingSecret": "store-tls"}},
            "flags": {"ha-enable-leader-election": True},
        },
        networkPolicy={"restrictEgress": True},
    ),
    "a replica store behind Sentinel without ports": values(
        epp={"replicas": 2, "replicaStore": {"url": "redis+sentinel://a,b:26380/main"}}, networkPolicy={"restrictEgress": True}
    ),
    "large": values(
        epp={
            "resources": {"requests": {"cpu": "6500m", "memory": "4Gi"}, "limits": {"memory": "8Gi", "cpu": 8}},
            "flags": {"max-endpoints": 8192, "index-entries": 4194304, "v": 4, "emit-endpoint-scores": True},
        }
    ),
    "workers by flag": values(epp={"flags": {"workers": 5, "workers-max": 6, "log-format": "console"}}),
    "half a CPU": values(epp={"resources": {"requests": {"cpu": 0.5, "memory": "256Mi"}}}),
    "little memory, in bytes": values(epp={"resources": {"requests": {"cpu": 1, "memory": "128Mi"}, "limits": {"memory": 268435456}}}),
    "other times": values(epp={"preStopSleepSeconds": 0, "drainTimeoutSeconds": 600, "terminationGracePeriodSeconds": 700}),
    "other ports": values(
        mode="standalone",
        metricsPort=9191,
        epp={"extProcPort": 9102, "grpcHealthPort": 9103, "extraContainerPorts": [{"name": "kv", "containerPort": 5557}]},
        proxy={"port": 8088, "metricsPort": 19002, "resources": {"requests": {"cpu": "1500m", "memory": "2Gi"}}},
        extraServicePorts=[{"name": "kv", "port": 5557, "targetPort": 5557, "protocol": "TCP"}],
        modelServers={"targetPorts": [{"number": 8000}, {"number": 8001}]},
    ),
    "TLS beside Envoy": values(mode="standalone", epp={"flags": {"secure-serving": True}}),
    "plaintext to a gateway": values(epp={"flags": {"secure-serving": False}}) | {"provider": {"name": "istio"}},
    "monitoring": values(
        monitoring={"interval": "5s", "prometheus": {"enabled": True, "extraLabels": {"team": "x"}, "rules": {"enabled": True}}}
    ),
    "monitoring without tokens": values(monitoring={"prometheus": {"enabled": True, "auth": {"enabled": False}}}),
    "tracing": values(tracing={"enabled": True, "otelExporterEndpoint": "http://otel:4317"}),
    "grpc servers": values(modelServers={"protocol": "grpc"}),
    "triton": values(mode="standalone", modelServers={"type": "triton", "protocol": "grpc"}),
    "sglang over https": values(
        modelServers={"type": "sglang"},
        epp={
            "parsers": ["openai-parser"],
            "metricsDataSource": {"scheme": "https", "path": "/engine/metrics", "insecureSkipVerify": False},
        },
    ),
    "a custom configuration": values(
        epp={
            "pluginsConfigFile": "own.yaml",
            "pluginsCustomConfig": {"own.yaml": "plugins:\n- type: queue-scorer\n", "other.yaml": "plugins: []\n"},
        }
    ),
    "a render sidecar": values(
        tokenizer={"enabled": True, "modelName": "Qwen/Qwen3-32B"},
        kvEvents={"serverPorts": [5556, 5559]},
        networkPolicy={"restrictEgress": True},
    ),
    "a render sidecar in every detail, and servers that connect": values(
        mode="standalone",
        tokenizer={
            "enabled": True,
            "modelName": "m",
            "image": {"registry": "registry.example", "repository": "team/render", "tag": "1", "pullPolicy": "Always"},
            "port": 8009,
            "command": ["serve"],
            "extraArgs": ["--max-model-len=4096"],
            "env": [{"name": "HOME", "value": "/models"}],
            "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
            "volumes": [{"name": "models", "emptyDir": {}}],
            "volumeMounts": [{"name": "models", "mountPath": "/models"}],
            "readinessProbe": {"httpGet": {"path": "/ready", "port": "render-http"}},
        },
        kvEvents={"bindPort": 5557},
    ),
    "several pools": {
        "router": {
            "pools": {
                "ports": [9002, 9102, 9103],
                "create": [
                    {"name": "llama", "port": 9102, "matchLabels": {"app": "llama"}},
                    {"name": "qwen", "port": 9103, "matchLabels": {"app": "qwen"}, "targetPorts": [{"number": 8000}, {"number": 8001}]},
                ],
            },
            "epp": {"replicas": 2, "pluginsConfigFile": "default.yaml", "pluginsCustomConfig": {"default.yaml": "plugins: []\n"}},
            "networkPolicy": {"restrictEgress": True},
        }
    },
    "several pools with a store": {
        "router": {"pools": {"ports": [9102]}, "epp": {"replicas": 2, "replicaStore": {"url": "redis://valkey"}}}
    },
    "several pools with the default configuration": {"router": {"pools": {"ports": [9102]}}},
    "objectives": values(inferenceObjectives=[{"name": "interactive", "priority": 10}, {"name": "batch", "priority": -5}]),
    "network": values(
        networkPolicy={
            "gateway": [{"namespaceSelector": {"matchLabels": {"gateway": "yes"}}}],
            "monitoring": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
            "restrictEgress": True,
            "extraIngress": [{"ports": [{"port": 5557, "protocol": "TCP"}]}],
            "extraEgress": [{"ports": [{"port": 4317, "protocol": "TCP"}]}],
        }
    ),
    "no network policy": values(networkPolicy={"enabled": False}),
    "placed": values(
        epp={
            "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
            "replicas": 2,
            "tolerations": [{"key": "dedicated", "operator": "Exists"}],
            "nodeSelector": {"disk": "fast"},
            "priorityClassName": "system-cluster-critical",
            "podAnnotations": {"note": "true"},
            "env": [{"name": "TZ", "value": "UTC"}],
            "volumes": [{"name": "state", "emptyDir": {}}],
            "volumeMounts": [{"name": "state", "mountPath": "/state"}],
            "image": {"registry": "registry.example", "repository": "team/epp", "tag": "9", "pullPolicy": "Always"},
            "sharedMemory": {"sizeLimit": "1Gi"},
        }
    ),
    "own security": values(
        epp={
            "imagePullSecrets": [{"name": "registry"}],
            "podSecurityContext": {"runAsUser": 1000},
            "securityContext": {"readOnlyRootFilesystem": False},
            "deploymentStrategy": {"type": "Recreate"},
        }
    ),
    "istio and a route": values()
    | {
        "provider": {
            "name": "istio",
            "istio": {"destinationRule": {"trafficPolicy": {"connectionPool": {"http": {"http2MaxRequests": 40000}}}}},
        },
        "httpRoute": {"create": True, "baseModel": "m", "headerMatches": {"x-b": "1", "x-a": "2"}, "inferenceGatewayNamespace": "gw"},
    },
    "a route": values() | {"httpRoute": {"create": True}},
}

REFUSED: dict[str, tuple[Json, str]] = {
    "no labels": ({}, "router.modelServers.matchLabels: say which pods are model servers"),
    "too short a grace period": (
        values(epp={"terminationGracePeriodSeconds": 60}),
        "router.epp.terminationGracePeriodSeconds: 60 is less than 130: preStopSleepSeconds 10 + drainTimeoutSeconds 110 + 10 to end",
    ),
    "a flag with a separate value": (
        values(epp={"flags": {"grpc-port": 1}}),
        "router.epp.flags.grpc-port: set router.epp.extProcPort instead",
    ),
    "the password of the replica store in its URL": (
        values(epp={"replicaStore": {"url": "redis://:secret@valkey:6379"}}),
        "router.epp.replicaStore.url: it has a password",
    ),
    "the Secret of a replica store that is not given": (
        values(epp={"replicaStore": {"existingSecret": "store"}}),
        "router.epp.replicaStore.url: without it, existingSecret and tls have no effect",
    ),
    "TLS to a replica store without TLS": (
        values(epp={"replicaStore": {"url": "redis://valkey", "tls": {"existingSecret": "store"}}}),
        "router.epp.replicaStore.tls: only rediss:// and redis+sentinel:// have TLS",
    ),
    "a certificate for the replica store from nowhere": (
        values(epp={"replicaStore": {"url": "rediss://valkey", "tls": {"clientCertificate": True}}}),
        "router.epp.replicaStore.tls.existingSecret: name the Secret with tls.crt and tls.key",
    ),
    "more replicas than know each other": (
        values(epp={"replicas": 10, "replicaStore": {"url": "redis://valkey"}}),
        "router.epp.replicas: 10 replicas, but each counts only 8 others; set router.epp.flags.replicas-max to 9",
    ),
    "the replica store as a flag": (
        values(epp={"flags": {"replica-store": "redis://valkey"}}),
        "router.epp.flags.replica-store: set router.epp.replicaStore.url instead",
    ),
    "a flag with dashes": (values(epp={"flags": {"--workers": 2}}), "router.epp.flags.--workers: flags are written without dashes"),
    "an invalid count": (values(epp={"flags": {"workers": "two"}}), "router.epp.flags.workers: 'two' is no count"),
    "an invalid CPU quantity": (values(epp={"resources": {"requests": {"cpu": "2 CPUs"}}}), "'2 CPUs' is no quantity of CPUs"),
    "too little memory": (
        values(epp={"resources": {"limits": {"memory": "256Mi"}}}),
        "router.epp.resources.limits.memory: 256Mi is less than 272Mi: /dev/shm 48 + 192 + 16 a worker",
    ),
    "too little memory for a large index": (
        values(epp={"flags": {"index-entries": 1 << 27, "workers": 4}, "resources": {"limits": {"memory": "1.5Gi"}}}),
        "router.epp.resources.limits.memory: 1.5Gi is less than 2224Mi: /dev/shm 1968 + 192 + 16 a worker",
    ),
    "a render sidecar without a model": (
        values(tokenizer={"enabled": True}),
        "router.tokenizer.modelName: name the model that the servers serve",
    ),
    "a render sidecar on a port of the picker": (
        values(tokenizer={"enabled": True, "modelName": "m", "port": 9002}),
        "router.tokenizer.port: 9002 is also router.epp.extProcPort; all containers of a pod share its ports",
    ),
    "events on the port of the render sidecar": (
        values(tokenizer={"enabled": True, "modelName": "m", "port": 5557}, kvEvents={"bindPort": 5557}),
        "router.kvEvents.bindPort: 5557 is also router.tokenizer.port",
    ),
    "events on a port of Envoy": (
        values(mode="standalone", kvEvents={"bindPort": 8081}),
        "router.kvEvents.bindPort: 8081 is also router.proxy.port",
    ),
    "objectives without a pool": (
        values(mode="standalone", inferenceObjectives=[{"name": "a", "priority": 1}]),
        "router.inferenceObjectives: without an InferencePool none are read",
    ),
    "a missing file": (
        values(epp={"pluginsConfigFile": "a.yaml", "pluginsCustomConfig": {"b.yaml": ""}}),
        "router.epp.pluginsConfigFile: 'a.yaml' is not among router.epp.pluginsCustomConfig (b.yaml)",
    ),
    "a route without a gateway": (
        values(mode="standalone") | {"httpRoute": {"create": True}},
        "httpRoute.create: in standalone mode there is no gateway",
    ),
    "several pools beside an Envoy": (
        values(mode="standalone", pools={"ports": [9102]}),
        "router.pools.ports: in standalone mode there is one pool",
    ),
    "several pools with leader election": (
        values(pools={"ports": [9102]}, epp={"flags": {"ha-enable-leader-election": True}}),
        "router.pools.ports: several pools have no leader election",
    ),
    "objectives of several pools": (
        values(pools={"ports": [9102]}, inferenceObjectives=[{"name": "a", "priority": 1}]),
        "router.inferenceObjectives: they belong to the pool of the release",
    ),
    "a route to several pools": (
        values(pools={"ports": [9102]}) | {"httpRoute": {"create": True}},
        "httpRoute.create: a route leads to the pool of the release",
    ),
    "a pool at a port of the picker": (values(pools={"ports": [9090]}), "router.pools.ports: 9090 is a port of the picker"),
    "a pool at another port": (
        values(pools={"ports": [9102], "create": [{"name": "a", "port": 9103, "matchLabels": {"app": "a"}}]}),
        "router.pools.create: pool a has port 9103, which router.pools.ports does not have",
    ),
    "two pools at one port": (
        values(pools={"ports": [9102], "create": [{"name": name, "port": 9102, "matchLabels": {"app": name}} for name in ("a", "b")]}),
        "router.pools.create: pools a and b both have port 9102",
    ),
    "a proxy in gateway mode": (values(proxy={"enabled": True}), "router.proxy.enabled: router.mode gateway has no proxy"),
    "an invalid CPU quantity of Envoy": (
        values(mode="standalone", proxy={"resources": {"requests": {"cpu": "x"}}}),
        "router.proxy.resources.requests.cpu: 'x' is no quantity of CPUs",
    ),
    "istio without a gateway": (
        values(mode="standalone") | {"provider": {"name": "istio"}},
        "provider.name: in standalone mode there is no gateway",
    ),
}
UNKNOWN: dict[str, Json] = {  # refused by the types in the package, and by the schema in helm
    "a name": values(epp={"replica": 2}),
    "a type": values(epp={"replicas": "many"}),
    "a mode": values(mode="sidecar"),
    "a port": values(metricsPort=0),
    "a port of events": values(kvEvents={"serverPorts": [0]}),
    "a value of the render sidecar": values(tokenizer={"model": "m"}),
    "nine target ports": values(modelServers={"targetPorts": [{"number": 8000 + n} for n in range(9)]}),
}

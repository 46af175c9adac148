"""What follows from values: names, labels, workers, times, sizes. And what cannot be, refused.

    workers         one for each CPU that the container requests, begun ones included; the pod reads it by the downward API
    /dev/shm        5/4 of 12 B an index entry + 5 KiB a place for an endpoint + 3,600 KiB a worker or a free place for one,
                    and 4 MiB; in whole 16 MiB
    end of a pod    preStop sleep, until no gateway sends to it any more; then the drain; then END_S to end. The grace period holds all
    memory          the limit holds /dev/shm, 192 MiB, and 16 MiB a worker
    leader election while there are several replicas, unless the flag says otherwise

The chart computes the same in its helpers.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from workers.manifests.values import BadValues, Scalar, Values

END_S: Final = 10  # of the grace period, behind preStop and drain: what is cut, the supervisor, unlinking
PRE_STOP_S: Final = 10
NAME_CHARS_MAX: Final = 40
SELECTOR = "app.kubernetes.io/name", "endpoint-picker"
INSTANCE_LABEL: Final = "app.kubernetes.io/instance"
VERSION_LABEL: Final = "app.kubernetes.io/version"
MAX_ENDPOINTS: Final = 1024
INDEX_ENTRIES: Final = 1 << 19
ENTRY_BYTES: Final = 12
PLACE_KIB: Final = 5
WORKER_KIB: Final = 3600
FIXED_KIB: Final = 4096
STEP_KIB: Final = 16 << 10
PROCESSES_MIB: Final = 192  # of a picker without workers
WORKER_MIB: Final = 16
OWNED: Final = {  # flags that the manifests set, and the value that sets them
    "grpc-port": "router.epp.extProcPort",
    "grpc-health-port": "router.epp.grpcHealthPort",
    "metrics-port": "router.metricsPort",
    "drain-timeout": "router.epp.drainTimeoutSeconds",
    "config-file": "router.epp.pluginsConfigFile",
    "config-text": "router.epp.pluginsCustomConfig",
    "pool-name": "the name of the release",
    "pool-namespace": "the namespace of the release",
    "endpoint-selector": "router.modelServers.matchLabels",
    "endpoint-target-ports": "router.modelServers.targetPorts",
    "endpoints": "router.modelServers.matchLabels",
    "metrics-endpoint-auth": "router.monitoring.prometheus.auth.enabled",
    "tracing": "router.tracing.enabled",
}
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_CPU = re.compile(r"([0-9]+)m|([0-9]*\.?[0-9]+)")
_MEMORY = re.compile(r"([0-9]+)(\.[0-9]+)?(|k|M|G|T|Ki|Mi|Gi|Ti)")
_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}
_FLAG = re.compile(r"[a-z][-a-z0-9]*")
_COUNT = re.compile(r"[1-9][0-9]{0,8}")


class Settled(NamedTuple):
    """Values that are in order, and what follows from them."""

    values: Values
    pool: str
    namespace: str
    version: str

    @property
    def name(self) -> str:
        """Of most objects."""
        return f"{self.pool}-epp"

    @property
    def cluster_name(self) -> str:
        """Of objects without a namespace."""
        return f"{self.pool}-{self.namespace}-epp"

    @property
    def selector(self) -> dict[str, str]:
        return {SELECTOR[0]: SELECTOR[1], INSTANCE_LABEL: self.name}

    @property
    def labels(self) -> dict[str, str]:
        return {**self.selector, VERSION_LABEL: self.version}

    @property
    def standalone(self) -> bool:
        return self.values.router.mode == "standalone"

    @property
    def makes_pool(self) -> bool:
        """Whether there is an InferencePool among the objects."""
        create = self.values.router.inference_pool.create
        return not self.standalone if create is None else create

    @property
    def watches_pool(self) -> bool:
        """Whether the picker follows an InferencePool, or else pods alone."""
        return not self.standalone or self.makes_pool

    @property
    def elects(self) -> bool:
        """Whether replicas elect a leader."""
        epp = self.values.router.epp
        asked = epp.flags.get("ha-enable-leader-election")
        return epp.replicas > 1 if asked is None else text(asked) == "true"

    @property
    def authenticates(self) -> bool:
        """Whether readers of the metrics port need a token."""
        return self.values.router.monitoring.prometheus.auth.enabled

    @property
    def secure(self) -> bool:
        """TLS on the ext_proc port; beside an Envoy of the same pod there is none unless it is asked for."""
        asked = self.values.router.epp.flags.get("secure-serving")
        return not self.standalone if asked is None else text(asked) == "true"

    @property
    def pre_stop_s(self) -> int:
        """A leader gives its lease back at once instead: nobody else is ready before."""
        asked = self.values.router.epp.pre_stop_sleep_seconds
        return (0 if self.elects else PRE_STOP_S) if asked is None else asked

    @property
    def workers(self) -> int:
        asked = self.values.router.epp.flags.get("workers")
        return cpus(self.values.router.epp.resources.requests["cpu"]) if asked is None else int(asked)

    @property
    def shared_memory(self) -> str:
        """The size of /dev/shm."""
        given = self.values.router.epp.shared_memory.size_limit
        return given or f"{shared_memory_mib(self.workers, self.values.router.epp.flags)}Mi"

    @property
    def image(self) -> str:
        image = self.values.router.epp.image
        tagged = f"{image.repository}:{image.tag or self.version}"
        return f"{image.registry}/{tagged}" if image.registry else tagged


def settled(values: Values, pool: str, namespace: str, version: str) -> Settled:
    """Raises BadValues with everything that is wrong."""
    found = Settled(values, pool, namespace, version)
    wrong = [*_names(found), *_flags(values.router.epp.flags), *_resources(found), *_times(found), *_fields(found)]
    if wrong := wrong or _memory(found):  # which needs the others to be in order
        raise BadValues("\n".join(wrong))
    return found


def cpus(quantity: str | float) -> int:
    """As the downward API rounds a CPU request: up. Raises BadValues."""
    match = _CPU.fullmatch(str(quantity))
    if match is None:
        raise BadValues(f"router.epp.resources.requests.cpu: '{quantity}' is no quantity of CPUs; write 2, 0.5 or 500m")
    return max(1, math.ceil(int(match[1]) / 1000 if match[1] else float(match[2])))


def shared_memory_mib(workers: int, flags: Mapping[str, Scalar]) -> int:
    """What /dev/shm should hold for so many workers."""
    most = int(flags.get("workers-max", 2 * workers))
    places, entries = int(flags.get("max-endpoints", MAX_ENDPOINTS)), int(flags.get("index-entries", INDEX_ENTRIES))
    kib = entries * ENTRY_BYTES // 1024 + places * PLACE_KIB + most * WORKER_KIB
    return -(-(kib * 5 // 4 + FIXED_KIB) // STEP_KIB) * (STEP_KIB >> 10)


def memory_least_mib(workers: int, flags: Mapping[str, Scalar]) -> int:
    """What a container's limit should be at least, in MiB: /dev/shm counts as its memory."""
    return shared_memory_mib(workers, flags) + PROCESSES_MIB + WORKER_MIB * workers


def memory_mib(quantity: str | float) -> int | None:
    """Of a quantity in one of the usual forms."""
    match = _MEMORY.fullmatch(str(quantity))
    return None if match is None else int(float(match[1] + (match[2] or "")) * _UNITS[match[3]]) >> 20


def text(value: Any) -> str:
    """As a flag's value is written."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _names(found: Settled) -> list[str]:
    wrong = []
    for what, name in (("pool name", found.pool), ("namespace", found.namespace)):
        if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX:
            wrong.append(
                f"{what} '{name}': at most {NAME_CHARS_MAX} lower-case letters, digits and dashes, beginning with a letter"
            )
    return wrong


def _flags(flags: Mapping[str, Scalar]) -> list[str]:
    wrong = [f"router.epp.flags.{name}: set {OWNED[name]} instead" for name in flags if name in OWNED]
    wrong += [
        f"router.epp.flags.{name}: flags are written without dashes in front"
        for name in flags
        if not _FLAG.fullmatch(name)
    ]
    counts = ("workers", "workers-max", "max-endpoints", "index-entries")
    return wrong + [
        f"router.epp.flags.{name}: '{flags[name]}' is no count"
        for name in counts
        if name in flags and not _COUNT.fullmatch(str(flags[name]))
    ]


def _resources(found: Settled) -> list[str]:
    requests = found.values.router.epp.resources.requests
    missing = [
        f"router.epp.resources.requests.{name}: has to be set" for name in ("cpu", "memory") if name not in requests
    ]
    if "cpu" in requests:
        try:
            cpus(requests["cpu"])
        except BadValues as wrong:
            missing.append(str(wrong))
    return missing


def _memory(found: Settled) -> list[str]:
    epp = found.values.router.epp
    limit = epp.resources.limits.get("memory")
    given = None if limit is None else memory_mib(limit)
    if given is None or epp.shared_memory.size_limit:
        return []
    shared, needed = shared_memory_mib(found.workers, epp.flags), memory_least_mib(found.workers, epp.flags)
    if given >= needed:
        return []
    return [
        f"router.epp.resources.limits.memory: {limit} is less than {needed}Mi: /dev/shm {shared} + {PROCESSES_MIB} "
        f"+ {WORKER_MIB} a worker; raise it, or have fewer workers or a smaller index"
    ]


def _times(found: Settled) -> list[str]:
    epp = found.values.router.epp
    needed = found.pre_stop_s + epp.drain_timeout_seconds + END_S
    if epp.termination_grace_period_seconds >= needed:
        return []
    return [
        f"router.epp.terminationGracePeriodSeconds: {epp.termination_grace_period_seconds} is less than {needed}: preStopSleepSeconds "
        f"{found.pre_stop_s} + drainTimeoutSeconds {epp.drain_timeout_seconds} + {END_S} to end; open requests would be cut"
    ]


def _fields(found: Settled) -> list[str]:
    router, wrong = found.values.router, []
    if (found.makes_pool or not found.watches_pool) and not router.model_servers.match_labels:
        wrong.append("router.modelServers.matchLabels: say which pods are model servers, for example app: vllm")
    if router.inference_objectives and not found.watches_pool:
        wrong.append(
            "router.inferenceObjectives: without an InferencePool none are read; set router.inferencePool.create"
        )
    epp = router.epp
    if epp.plugins_custom_config and epp.plugins_config_file not in epp.plugins_custom_config:
        wrong.append(
            f"router.epp.pluginsConfigFile: '{epp.plugins_config_file}' is not among router.epp.pluginsCustomConfig "
            f"({', '.join(sorted(epp.plugins_custom_config))})"
        )
    if found.standalone and found.values.http_route.create:
        wrong.append(
            "httpRoute.create: in standalone mode there is no gateway; remove it, or set router.mode to gateway"
        )
    if found.standalone and found.values.provider.name != "none":
        wrong.append("provider.name: in standalone mode there is no gateway; remove it, or set router.mode to gateway")
    return wrong

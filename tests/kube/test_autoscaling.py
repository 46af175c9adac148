"""The autoscaling examples on a real API server: a HorizontalPodAutoscaler, and a ScaledObject with the fields that KEDA 2 defines."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube.client import Kube, Object, Refused, collection
from tests.kube.control_plane import ControlPlane
from tests.kube.objects import definition, install, namespace, uninstall

EXAMPLES = Path(__file__).parents[2] / "deploy" / "autoscaling"
STRICT = "?fieldManager=tests&fieldValidation=Strict"
SPACE = "autoscaling"

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "format": "int32", "minimum": 0}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}


def _fields(required: list[str], **properties: Any) -> Object:
    return {"type": "object", "required": required, "properties": properties}


_RULES = _fields([], stabilizationWindowSeconds=_COUNT, selectPolicy=_TEXT)
_TRIGGER = _fields(["type", "metadata"], type=_TEXT, name=_TEXT, metadata=_TEXTS, metricType=_TEXT)
SCALED_OBJECT = definition(  # only the fields that the example may use
    "keda.sh",
    "v1alpha1",
    "ScaledObject",
    _fields(
        ["scaleTargetRef", "triggers"],
        scaleTargetRef=_fields(["name"], name=_TEXT, kind=_TEXT, apiVersion=_TEXT),
        minReplicaCount=_COUNT,
        maxReplicaCount=_COUNT,
        pollingInterval=_COUNT,
        cooldownPeriod=_COUNT,
        fallback=_fields(
            ["failureThreshold", "replicas"],
            failureThreshold=_COUNT,
            replicas=_COUNT,
            behavior={**_TEXT, "enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
        ),
        advanced=_fields([], horizontalPodAutoscalerConfig=_fields([], behavior=_fields([], scaleDown=_RULES, scaleUp=_RULES))),
        triggers={"type": "array", "minItems": 1, "items": _TRIGGER},
    ),
)


@pytest.fixture(scope="module")
def kube(plane: ControlPlane) -> Iterator[Kube]:
    kube = plane.kube()
    kube.create(namespace(SPACE))
    install(kube, [SCALED_OBJECT])
    yield kube
    uninstall(kube, [SCALED_OBJECT])
    plane.close()


def example(name: str) -> Object:
    found: Object = yaml.safe_load((EXAMPLES / name).read_text())
    found["metadata"]["namespace"] = SPACE
    return found


def applied(kube: Kube, thing: Object) -> Object:
    """Applies an object as `kubectl apply --server-side --validate=strict` does. Returns it as it was stored."""
    place = collection(thing["apiVersion"], f"{thing['kind'].lower()}s", SPACE)
    path = f"{place}/{thing['metadata']['name']}{STRICT}"
    stored: Object = kube.request("PATCH", path, thing, "application/apply-patch+yaml")
    return stored


@pytest.mark.parametrize("name", ["hpa.yaml", "keda.yaml"])
def test_the_api_server_takes_the_example_and_keeps_all_of_it(kube: Kube, name: str) -> None:
    thing = example(name)
    stored = applied(kube, thing)
    assert contains(stored["spec"], thing["spec"])


@pytest.mark.parametrize("name", ["hpa.yaml", "keda.yaml"])
def test_an_unknown_field_would_be_refused(kube: Kube, name: str) -> None:
    thing = copy.deepcopy(example(name))
    thing["spec"]["maxReplica"] = 3
    with pytest.raises(Refused, match="maxReplica"):
        applied(kube, thing)


def contains(stored: Any, given: Any) -> bool:
    """Returns whether a stored value has all fields that were given. The API server adds defaults."""
    if isinstance(given, dict):
        return all(key in stored and contains(stored[key], value) for key, value in given.items())
    if isinstance(given, list):
        return len(stored) == len(given) and all(map(contains, stored, given))
    return bool(stored == given)

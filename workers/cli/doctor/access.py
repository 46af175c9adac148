"""Asks the Kubernetes API server which of the picker's requests its service account may make (SelfSubjectAccessReview)."""

import asyncio
import os
from collections.abc import Iterator
from typing import Final

import msgspec

from epp.errors import UNREADABLE
from workers.cli.doctor.running import Running
from workers.host.options import POOL_GROUP
from workers.shared.doctor_report import ERROR, WARNING, Finding
from workers.supervisor.kube.api import Api
from workers.supervisor.kube.errors import Access, ApiError, Unreachable
from workers.supervisor.kube.lease import lease_name
from workers.supervisor.kube.object_kinds import GROUPS

REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
TRUE: Final = "true"


class _Status(msgspec.Struct):
    allowed: bool = False
    reason: str = ""


class Answer(msgspec.Struct):
    """The API server's answer to a question about one access."""

    status: _Status


_decode = msgspec.json.Decoder(Answer).decode


def needed(picker: Running) -> Iterator[Access]:
    """Yields every access that this picker needs in Kubernetes, by its flags. With several pools, it follows all InferencePools."""
    namespace, several = picker.flag("pool-namespace"), "pools" in picker.state
    for verb in ("list", "watch"):
        yield Access(verb, "", "pods", namespace)
        if not picker.flag("endpoint-selector"):
            yield Access(
                verb, picker.flag("pool-group") or POOL_GROUP, "inferencepools", namespace, "" if several else picker.flag("pool-name")
            )
            for resource in ("inferenceobjectives", "inferencemodelrewrites"):
                yield Access(verb, GROUPS[0], resource, namespace)
    if not (several or picker.flag("endpoint-selector")):
        yield Access("create", "", "events", namespace)
    if picker.flag("ha-enable-leader-election") == TRUE:
        yield Access("create", "coordination.k8s.io", "leases", namespace)  # no rule restricts a creation by name
        lease = lease_name(namespace, picker.flag("pool-name"))
        for verb in ("get", "watch", "update"):
            yield Access(verb, "coordination.k8s.io", "leases", namespace, lease)
    if picker.flag("metrics-endpoint-auth") != "false":
        yield Access("create", "authentication.k8s.io", "tokenreviews")
        yield Access("create", "authorization.k8s.io", "subjectaccessreviews")


def uses_kubernetes(picker: Running) -> bool:
    """Returns whether the picker's endpoints come from Kubernetes."""
    flags = ("endpoint-selector", "service-name")
    return (picker.given("pool-name") or any(map(picker.flag, flags))) and not picker.flag("endpoints")


def access_findings(picker: Running) -> list[Finding]:
    """Asks the API server about each access. Raises ValueError if no API server is known."""
    return asyncio.run(_asked(list(needed(picker))))


async def _asked(wanted: list[Access]) -> list[Finding]:
    api = await Api.connect(os.environ)
    try:
        return [found for each in wanted if (found := await _review(api, each)) is not None]
    except (ApiError, Unreachable) as failed:
        fix = "check the API server's address and the service account: `kubectl auth can-i --list`"
        return [Finding("kubernetes-api", ERROR, "The Kubernetes API does not answer", str(failed), fix)]
    finally:
        await api.close()


async def _review(api: Api, access: Access) -> Finding | None:
    """Asks about one access. Returns a finding if the access is not allowed."""
    spec = {"resourceAttributes": access._asdict()}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}
    answer = await api.request("POST", REVIEWS, body=msgspec.json.encode(body))
    try:
        return verdict(access, _decode(answer))
    except UNREADABLE as strange:
        raise Unreachable(f"{api.host}{REVIEWS} does not answer as an API server does: {strange}") from strange


def verdict(access: Access, answer: Answer) -> Finding | None:
    """Returns a finding if the API server's answer does not allow the access."""
    status = answer.status
    if status.allowed:
        return None
    kind = f"a Role in namespace {access.namespace}" if access.namespace else "a ClusterRole"
    optional = access.resource == "events"
    return Finding(
        "rbac-verb",
        WARNING if optional else ERROR,
        f"The picker may not {access.verb} {access.resource}",
        f"the API server says no: {status.reason or 'no rule allows it'}",
        f"add to {kind} of the picker's service account: {access.rule()}",
    )

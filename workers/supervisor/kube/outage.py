"""Reports once that the API server is away, and once that it answers again, for all reflectors that share an `Outage`."""

from collections.abc import Callable
from http import HTTPStatus

from workers.supervisor.kube.api import Resource
from workers.supervisor.kube.errors import ApiError, Unreachable


class Outage:
    """Knows which resources cannot be followed, and reports when that begins and when it ends."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._away: set[Resource] = set()
        self._refused: dict[Resource, str] = {}
        self._since = 0.0

    def lost(self, resource: Resource, failure: Exception, now: float) -> None:
        """Records that a try to follow `resource` has failed. `now`: seconds on a monotonic clock."""
        if is_away(failure):
            if not self._away:
                self._since = now
                self._report("the Kubernetes API is away: what is known stays, and the picker tries again", reason=str(failure))
            self._away.add(resource)
            return
        text = str(failure)
        if self._refused.get(resource) != text:
            self._refused[resource] = text
            self._report("a resource cannot be followed: the picker tries again", **_fields(resource), reason=text)

    def found(self, resource: Resource, now: float) -> None:
        """Records that `resource` can be followed."""
        if self._refused.pop(resource, None) is not None:
            self._report("a resource can be followed again", **_fields(resource))
        if resource in self._away:
            self._away.discard(resource)
            if not self._away:
                self._report("the Kubernetes API answers again", away_s=round(now - self._since, 1))

    def refusals(self) -> dict[str, str]:
        """Returns resource -> why it cannot be followed, although the API server answers."""
        return {f"{resource} in namespace {resource.namespace}": why for resource, why in self._refused.items()}

    def forget(self, resource: Resource) -> None:
        """Records that `resource` is not followed any more."""
        self._refused.pop(resource, None)
        self._away.discard(resource)


def _fields(resource: Resource) -> dict[str, str]:
    return {"resource": str(resource), "namespace": resource.namespace}


def is_away(failure: Exception) -> bool:
    """Whether a failure concerns the whole API server, not one request."""
    if isinstance(failure, ApiError):
        return failure.status >= 500 or failure.status == HTTPStatus.TOO_MANY_REQUESTS
    return isinstance(failure, Unreachable)

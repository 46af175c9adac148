"""Screeners restrict the candidates of all profiles. This one keeps a request on one revision of a DisaggregatedSet during a rollout.

Prefill and decode servers of different revisions may not understand each other's KV cache.

Rules, names and defaults are those of the reference picker. Only pods of the pool are considered. A pod with several ports is counted once.
Pods that are down are considered only if, without them, no revision has all required roles.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Endpoint, EndpointList, Mask, Snapshot
from epp.decision.decision import Decision, Response
from epp.endpoints.label_selectors import parse
from epp.metrics import counter, gauge
from epp.plugin import Count, Gauge, ResponseReceived, Screener, Services, plugin
from epp.request import Request

REVISION_LABEL = "disaggregatedset.x-k8s.io/revision"
ROLE_LABEL = "disaggregatedset.x-k8s.io/role"

NO_MATCH = counter("disaggregatedset_strict_header_no_match_total", "Requests with a strict header that no endpoint matched.", "selector")

SHARE = gauge(
    "disaggregatedset_revision_gating_share",
    "Share of requests that each revision gets; 0 while it lacks a role.",
    "mode",
    "revision",
    over_workers="mean",
)

Name = Annotated[str, msgspec.Meta(min_length=1)]


class Scope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The pods that are considered.

    label_selector: A label selector of Kubernetes, as text, such as `disaggregatedset.x-k8s.io/name=my-set`.
    """

    label_selector: Name


class HeaderSelector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A header and the endpoints' label that it selects. The response gets the header with the chosen endpoint's value of the label.

    name: The name of this selector in metrics.
    header_name: The header, in any case.
    label_key: The label.
    mode: `strict` keeps only endpoints whose label has the value of the request's header; `prefer` leaves the choice to a scorer.
    """

    name: Name
    header_name: Name
    label_key: Name
    mode: Literal["strict", "prefer"]


class RequireRoles(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The older form of `required_roles`.

    values: The roles.
    """

    values: tuple[Name, ...] = ()


class RevisionGating(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How a revision is chosen for a request without a strict header.

    mode: `max-role` weighs revisions by their pods of the role that has most pods, `sum` by their pods of all roles. `disabled`: any
        revision may serve.
    required_roles: A revision gets requests only if it has a pod of each of these roles.
    require_roles: The older form of `required_roles`.
    revision_label_key: The label with a pod's revision.
    role_label_key: The label with a pod's role.
    """

    mode: Literal["sum", "max-role", "disabled"]
    required_roles: tuple[Name, ...] = ()
    require_roles: RequireRoles | None = None
    revision_label_key: str = REVISION_LABEL
    role_label_key: str = ROLE_LABEL


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which pods are considered, which headers choose endpoints, and how a revision is chosen.

    scope: The pods that are considered.
    revision_gating: How a revision is chosen.
    header_selectors: Headers that choose endpoints.
    """

    scope: Scope
    revision_gating: RevisionGating
    header_selectors: tuple[HeaderSelector, ...] = ()


class Labelled:
    """Knows which endpoints of an endpoint list have which value of a label."""

    __slots__ = ("_endpoint_list", "_key", "_rows")

    def __init__(self, key: str) -> None:
        self._key = key
        self._endpoint_list = EndpointList(())
        self._rows: dict[str, Mask] = {}

    def masks(self, endpoint_list: EndpointList) -> Mapping[str, Mask]:
        """Returns, for each value that is not empty, which endpoints have it: value -> bool, shape (endpoints,)."""
        if endpoint_list is not self._endpoint_list:
            rows: dict[str, Mask] = {}
            for row, endpoint in enumerate(endpoint_list.endpoints):
                if value := endpoint.labels.get(self._key):
                    rows.setdefault(value, np.zeros(len(endpoint_list.endpoints), dtype=bool))[row] = True
            self._rows, self._endpoint_list = rows, endpoint_list
        return self._rows

    def among(self, candidates: Candidates, value: str) -> Mask:
        """Returns which candidates have this value: bool, shape (candidates,)."""
        mask = self.masks(candidates.snapshot.endpoint_list).get(value)
        if mask is None:
            return np.zeros(len(candidates), dtype=bool)
        return mask if candidates.rows is None else mask[candidates.rows]


@plugin("disaggregatedset-rollout-screener")
class RolloutScreener(Screener, ResponseReceived):
    """Gives all profiles the endpoints of one revision of a DisaggregatedSet. The revision is drawn in proportion to numbers of pods.

    A revision without a pod of each required role gets no request. A request with a strict header gets the endpoints that its header
    names, from all revisions with all required roles. If no endpoint is left, the request is refused with 503.
    """

    Params = Parameters
    counts_with: ClassVar = {
        f"revisionGating.{name}": ("revisionGating.mode", ("max-role", "sum"))
        for name in ("requiredRoles", "requireRoles", "revisionLabelKey", "roleLabelKey")
    }
    renamed: ClassVar[Mapping[str, str]] = {"revisionGating.requireRoles.values": "revisionGating.requiredRoles"}
    metrics = (NO_MATCH, SHARE)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        gating = params.revision_gating
        try:
            self._in_scope = parse(params.scope.label_selector).matches
        except ValueError as problem:
            raise ValueError(f"scope.labelSelector: {problem}") from None
        self._roles = _roles(gating)
        if gating.require_roles is not None:
            self.deprecated = self.renamed
        self._mode: str = gating.mode
        self._gates = gating.mode != "disabled"
        self._by_largest = gating.mode == "max-role"
        self._revision_label = gating.revision_label_key or REVISION_LABEL
        self._role_label = gating.role_label_key or ROLE_LABEL
        self._revisions = Labelled(self._revision_label)
        _check_unique([(s.name, s.header_name.lower()) for s in params.header_selectors])
        self._stamps = [(s.header_name.lower(), s.label_key) for s in params.header_selectors]
        self._strict = [(s.name, s.header_name.lower(), Labelled(s.label_key)) for s in params.header_selectors if s.mode == "strict"]
        self.reads_headers = [header for _, header, _ in self._strict]
        self._counted: EndpointList | Snapshot | None = None  # the endpoint list or snapshot for which `_shares` was computed
        self._shares: dict[str, float] = {}
        self._rng: random.Random
        self._no_match: Count
        self._shown: Gauge
        self._seen: set[str] = set()  # the revisions on the metrics page

    def start(self, services: Services) -> None:
        self._rng = services.rng
        self._no_match = services.count(self, NO_MATCH)
        self._shown = services.gauge(self, SHARE)

    def screen(self, request: Request, candidates: Candidates) -> Mask:
        wanted = [(s, labels, value) for s, header, labels in self._strict if (value := request.headers.get(header))]
        mask = self._gated(candidates, pick=not wanted) if self._gates else np.ones(len(candidates), dtype=bool)
        for selector, labels, value in wanted:
            if not mask.any():
                break
            mask = mask & labels.among(candidates, value)
            if not mask.any():
                self._no_match.add(selector)
        return mask

    def _gated(self, candidates: Candidates, *, pick: bool) -> Mask:
        """Returns a mask of candidates: those of one revision, which is drawn, or, if `pick` is False, those of all revisions with all
        required roles.
        """
        shares = self.shares(candidates.snapshot)
        served = {r: mask for r in shares if (mask := self._revisions.among(candidates, r)).any()}
        if not served:
            return np.zeros(len(candidates), dtype=bool)
        if pick:
            names = sorted(served)
            return served[self._rng.choices(names, [shares[name] for name in names])[0]]
        covered: Mask = np.logical_or.reduce(list(served.values()))
        return covered

    def shares(self, snapshot: Snapshot) -> Mapping[str, float]:
        """Returns the share of requests of each revision that has a pod of each required role. The shares sum to 1.

        Returns an empty mapping without such a revision.
        """
        counted = snapshot if snapshot.any_down else snapshot.endpoint_list
        if counted is not self._counted:
            up = [e for e, down in zip(snapshot.endpoints, snapshot.down.tolist(), strict=True) if not down]
            self._shares = self._weighed(up) or self._weighed(snapshot.endpoints)
            self._counted = counted
            self._show(snapshot.endpoints)
        return self._shares

    def _show(self, endpoints: Sequence[Endpoint]) -> None:
        seen = {
            revision
            for endpoint in endpoints
            if (revision := endpoint.labels.get(self._revision_label)) and self._in_scope(endpoint.labels)
        }
        for revision in seen | self._seen:
            self._shown.set(self._shares.get(revision, 0.0), self._mode, revision, weight=1.0 if revision in seen else 0.0)
        self._seen = seen

    def _weighed(self, endpoints: Iterable[Endpoint]) -> dict[str, float]:
        hosts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))  # revision -> role -> hosts
        for endpoint in endpoints:
            labels = endpoint.labels
            revision, role = labels.get(self._revision_label), labels.get(self._role_label)
            if revision and role and self._in_scope(labels):
                hosts[revision][role].add(endpoint.host)
        pods = {r: {role: len(of.get(role, ())) for role in self._roles} for r, of in hosts.items()}
        pods = {revision: counts for revision, counts in pods.items() if all(counts.values())}
        weighing = self._roles
        if self._by_largest:
            totals = Counter[str]()
            for counts in pods.values():
                totals.update(counts)
            # The role with the most pods; the first role if several have equally many.
            weighing = (max(self._roles, key=lambda role: totals[role]),)
        weights = {revision: sum(counts[role] for role in weighing) for revision, counts in pods.items()}
        total = sum(weights.values())
        return {revision: weight / total for revision, weight in weights.items()}

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        served = response.served
        chosen = next((target for target in decision.targets if target.address == served), decision.targets[0])
        for header, label in self._stamps:
            if value := chosen.labels.get(label):
                response.set_headers[header] = value


def _roles(gating: RevisionGating) -> tuple[str, ...]:
    where, roles = "requiredRoles", gating.required_roles
    if gating.require_roles is not None:
        if roles:
            raise ValueError("revisionGating.requireRoles: is given beside requiredRoles, its current form; remove it")
        where, roles = "requireRoles.values", gating.require_roles.values
    if gating.mode != "disabled" and not roles:
        raise ValueError(f"revisionGating.{where}: is empty; mode {gating.mode} needs at least one role")
    if len(set(roles)) < len(roles):
        raise ValueError(f"revisionGating.{where}: names a role twice; name each role once")
    return roles


def _check_unique(selectors: Sequence[tuple[str, str]]) -> None:
    for at, field in enumerate(("name", "headerName")):
        seen: set[str] = set()
        for index, selector in enumerate(selectors):
            if selector[at] in seen:
                raise ValueError(f"headerSelectors[{index}].{field}: '{selector[at]}' is given twice; give each selector its own")
            seen.add(selector[at])

"""All objects, in the order in which they are applied, and as text."""

import yaml

from workers.manifests import access, field, workload
from workers.manifests.settled import Settled
from workers.manifests.values import Json


def objects(found: Settled) -> list[Json]:
    """What is referred to comes first."""
    return [
        access.service_account(found),
        *access.roles(found),
        *access.reviewers(found),
        *access.readers(found),
        *workload.config_maps(found),
        workload.service(found),
        workload.deployment(found),
        *workload.budgets(found),
        *access.network_policies(found),
        *field.pools(found),
        *field.objectives(found),
        *field.routes(found),
        *field.destination_rules(found),
        *field.monitors(found),
    ]


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as such, and no anchors, which not everybody reads."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def as_yaml(made: list[Json]) -> str:
    """One document each."""
    dumped = (yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True) for one in made)
    return "---\n".join(dumped)

"""`epp manifests`: the Kubernetes objects that install a picker, as YAML for `kubectl apply --filename -`.

Values are those of the Helm chart; the options are short for the most needed ones, and what stands behind `--` are flags of `epp serve`.
What the picker would refuse at its start is refused here: its flags and its configuration are checked as `epp serve` does it.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Any

import click

from epp.config import ConfigErrors, load
from workers.cli import DISTRIBUTION
from workers.cli.configuration import read_file, told
from workers.cli.flags import PREFIX, BadConfiguration
from workers.cli.options import Options, collect, serve_options
from workers.manifests import files
from workers.manifests.render import as_yaml, objects
from workers.manifests.settled import Settled, settled
from workers.manifests.values import BadValues, Json, assigned, decoded, read
from workers.manifests.workload import arguments, environment

CONFIG_NAME = "config.yaml"  # of the file that --config-file brings, in the pod


@click.command("manifests")
@click.option(
    "--mode", type=click.Choice(["gateway", "standalone"]), help="Behind a gateway, or with an Envoy of its own."
)
@click.option("--pool-name", default="vllm", show_default=True, help="Name of the pool; objects are named after it.")
@click.option("--namespace", "-n", default="default", show_default=True, help="Of all objects that have one.")
@click.option("--selector", metavar="LABEL=VALUE,...", help="Which pods are model servers.")
@click.option("--target-ports", metavar="PORT,...", help="Where they listen. [default: 8000]")
@click.option("--replicas", type=int, help="Pickers; of several, one leads unless a flag says otherwise. [default: 1]")
@click.option("--cpu", metavar="QUANTITY", help="CPU request: there are as many workers. [default: 2]")
@click.option("--workers", type=int, help="Worker processes. [default: one for each CPU requested]")
@click.option("--image", metavar="NAME:TAG", help="Image of the picker. [default: endpoint-picker and its version]")
@click.option("--config-file", metavar="FILE", help="Configuration of the picker, instead of the default.")
@click.option("--values", "-f", "sources", multiple=True, metavar="FILE", help="Values of the Helm chart; repeatable.")
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="One such value; repeatable.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- FLAGS OF EPP SERVE]")
def command(
    pool_name: str,
    namespace: str,
    sources: tuple[str, ...],
    assignments: tuple[str, ...],
    flags: tuple[str, ...],
    **short: Any,
) -> None:
    """Print the Kubernetes objects that install a picker.

    Exit code 0: printed; 78: what was asked for cannot be.
    """
    try:
        layers = [read(read_file(file), file) for file in sources]
        layers += [assigned(assignment) for assignment in assignments]
        layers += [in_values(short), {"router": {"epp": {"flags": given(flags)}}}]
        found = settled(decoded(layers), pool_name, namespace, version())
    except BadValues as wrong:
        raise BadConfiguration("\n".join(f"error: {line}" for line in str(wrong).splitlines())) from wrong
    for warning in check(found):
        click.echo(f"warning: {warning}", err=True)
    click.echo(as_yaml(objects(found)), nl=False)


def version() -> str:
    """Of this package, as it stands in labels and in the image's tag."""
    try:
        return version_of(DISTRIBUTION)
    except PackageNotFoundError:  # run from a source tree
        return "0"


def in_values(short: Mapping[str, Any]) -> Json:
    """The options as values; those that were not given leave no trace."""
    epp: Json = {}
    router: Json = {"epp": epp}
    if short["mode"]:
        router["mode"] = short["mode"]
    if short["selector"]:
        router["modelServers"] = {"matchLabels": labels(short["selector"])}
    if short["target_ports"]:
        router.setdefault("modelServers", {})["targetPorts"] = ports(short["target_ports"])
    if short["replicas"] is not None:
        epp["replicas"] = short["replicas"]
    if short["cpu"]:
        epp["resources"] = {"requests": {"cpu": short["cpu"]}}
    if short["workers"] is not None:
        epp["flags"] = {"workers": short["workers"]}
    if short["image"]:
        epp["image"] = image(short["image"])
    if short["config_file"]:
        epp["pluginsConfigFile"] = CONFIG_NAME
        epp["pluginsCustomConfig"] = {CONFIG_NAME: read_file(short["config_file"])}
    return {"router": router}


def labels(selector: str) -> dict[str, str]:
    """Raises BadValues."""
    pairs = [part.partition("=") for part in selector.split(",")]
    if any(not name or not equals for name, equals, _ in pairs):
        raise BadValues(f"--selector '{selector}': write label=value, several with commas between them")
    found = {name: value for name, _, value in pairs}
    if len(found) < len(pairs):
        raise BadValues(f"--selector '{selector}': a pod has one value for a label; give each label once")
    return found


def ports(listed: str) -> list[Json]:
    """Raises BadValues."""
    if not all(part.isdecimal() for part in listed.split(",")):
        raise BadValues(f"--target-ports '{listed}': write numbers, several with commas between them")
    return [{"number": int(part)} for part in listed.split(",")]


def image(reference: str) -> Json:
    """`registry/repository:tag`; a digest is a tag behind `repository@sha256`. Raises BadValues."""
    repository, colon, tag = reference.rpartition(":")
    if not colon or "/" in tag:
        raise BadValues(f"--image '{reference}': write name:tag, so that it is known what runs")
    return {"registry": "", "repository": repository, "tag": tag}


def given(flags: Sequence[str]) -> dict[str, str]:
    """Flags of `epp serve` by name; a bare one is true. Raises BadValues."""
    found = {}
    for flag in flags:
        name, equals, value = flag.partition("=")
        if not name.startswith("-") or not name.strip("-"):
            raise BadValues(f"'{flag}' behind --: write flags of `epp serve` as --name=value")
        found[name.lstrip("-")] = value if equals else "true"
    return found


def check(found: Settled) -> list[str]:
    """What `epp serve` warns of in that pod. Raises BadConfiguration with what it would refuse."""
    line = click.command("epp serve")(serve_options(lambda _options: None))
    flags = [
        *arguments(found),
        *(f"{flag_of(one['name'])}={one['value']}" for one in environment(found) if is_flag(one)),
    ]
    with own_environment():
        context = line.make_context("epp serve", flags)
        options, warnings = collect(context.params, {"POD_NAME": f"{found.name}-0-0", "NAMESPACE": found.namespace})
    return warnings + check_configuration(found, options)


def check_configuration(found: Settled, options: Options) -> list[str]:
    """Nothing is said of one that needs plugins of one's own, which are not here."""
    if options.plugin_path:
        return []
    name = found.values.router.epp.plugins_config_file
    try:
        config = load(files.plugins(found)[name], name, allow_experimental=options.allow_experimental_plugins)
    except ConfigErrors as wrong:
        raise BadConfiguration(told([*wrong.warnings, *wrong.errors])) from wrong
    return [told([finding]) for finding in config.warnings]


def is_flag(variable: Json) -> bool:
    return variable["name"].startswith(PREFIX) and "value" in variable


def flag_of(variable: str) -> str:
    """The flag that an environment variable sets."""
    return "--" + variable.removeprefix(PREFIX).lower().replace("_", "-")


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """Flags from variables of whoever runs this command are not the pod's."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(PREFIX) or name == "NAMESPACE"}
    try:
        yield
    finally:
        os.environ.update(kept)

"""`epp manifests`: the Kubernetes objects that install a picker, as YAML for `kubectl apply --filename -`.

The Helm chart renders the objects, so the values are those of the chart; values of GIE's charts are translated. Options are short forms of
the most used values. The arguments after `--` are flags of `epp serve`. The command checks the flags and the configuration of the pod as
the picker does at its start.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import click

from epp.config.load import Surroundings, load
from epp.quantities import parse_quantity
from workers.cli.configuration import findings_text, read_file, refusing_errors
from workers.cli.flags import PREFIX, BadConfiguration
from workers.cli.manifests import helm
from workers.cli.manifests.extension_values import translated
from workers.cli.manifests.layers import BadValues, Layer, assigned, checked, read, with_source
from workers.cli.manifests.values import Json
from workers.cli.output import echo, echo_as_is
from workers.cli.serve_options import collect, serve_options
from workers.host.options import Options

CONFIG_NAME: Final = "config.yaml"  # the name that the file of --config-file has in the pod
CONTAINER: Final = "epp"


@click.command("manifests")
@click.option("--mode", type=click.Choice(["gateway", "standalone"]), help="Behind a gateway, or with an Envoy of its own.")
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
    pool_name: str, namespace: str, sources: tuple[str, ...], assignments: tuple[str, ...], flags: tuple[str, ...], **short: Any
) -> None:
    """Print the Kubernetes objects that install a picker. The command renders the Helm chart, so it needs helm.

    Exit code 0: printed; 1: helm is missing; 78: a value, an option or a flag is wrong.
    """
    layers: list[Layer] = []
    try:
        layers = [Layer(file, read(read_file(file), file)) for file in sources]
        layers += [Layer(f"--set {assignment}", assigned(assignment)) for assignment in assignments]
        layers = [current(layer) for layer in layers] + [*in_layers(short), *given(flags)]
        text = helm.rendered(checked(layers), pool_name, namespace)
    except BadValues as wrong:
        lines = (line if "(given by" in line else with_source(line, layers) for line in str(wrong).splitlines())
        raise BadConfiguration("\n".join(f"error: {line}" for line in lines)) from wrong
    except helm.NoHelm as missing:
        raise click.ClickException(str(missing)) from missing
    for warning in check(helm.objects(text)):
        echo(f"warning: {warning}", err=True)
    echo_as_is(text, nl=False)


def current(layer: Layer) -> Layer:
    """Translates the layer to values of this chart, if it has values of a chart of GIE. Warns of values without a counterpart."""
    values, remarks = translated(layer.values)
    for remark in remarks:
        echo(f"warning: {layer.source}: {remark}", err=True)
    return Layer(layer.source, values)


def in_layers(short: Mapping[str, Any]) -> list[Layer]:
    """Turns each option that was given into a layer of values."""
    made: Mapping[str, Callable[[Any], Json]] = {
        "mode": lambda mode: {"mode": mode},
        "selector": lambda selector: {"modelServers": {"matchLabels": labels(selector)}},
        "target_ports": lambda listed: {"modelServers": {"targetPorts": ports(listed)}},
        "replicas": lambda replicas: {"epp": {"replicas": replicas}},
        "cpu": lambda cpu: {"epp": {"resources": {"requests": {"cpu": cpu}}}},
        "workers": lambda workers: {"epp": {"flags": {"workers": workers}}},
        "image": lambda reference: {"epp": {"image": image(reference)}},
        "config_file": lambda file: {"epp": {"pluginsConfigFile": CONFIG_NAME, "pluginsCustomConfig": {CONFIG_NAME: read_file(file)}}},
    }
    return [
        Layer(f"--{name.replace('_', '-')} {short[name]}", {"router": make(short[name])})
        for name, make in made.items()
        if short[name] is not None
    ]


def labels(selector: str) -> dict[str, str]:
    """Parses label=value,label=value. Raises BadValues."""
    pairs = [part.partition("=") for part in selector.split(",")]
    if any(not name or not equals for name, equals, _ in pairs):
        raise BadValues(f"--selector '{selector}': write label=value, several with commas between them")
    found = {name: value for name, _, value in pairs}
    if len(found) < len(pairs):
        raise BadValues(f"--selector '{selector}': a pod has one value for a label; give each label once")
    return found


def ports(listed: str) -> list[Json]:
    """Parses port numbers, separated by commas, into `targetPorts`. Raises BadValues."""
    if not all(part.isdecimal() for part in listed.split(",")):
        raise BadValues(f"--target-ports '{listed}': write numbers, several with commas between them")
    return [{"number": int(part)} for part in listed.split(",")]


def image(reference: str) -> Json:
    """Turns `repository:tag` into the chart's image value. If the image has a digest, its repository becomes `repository@sha256`, and the
    digest becomes the tag. Raises BadValues.
    """
    repository, colon, tag = reference.rpartition(":")
    if not colon or "/" in tag:
        raise BadValues(f"--image '{reference}': write name:tag, so that it is known what runs")
    return {"registry": "", "repository": repository, "tag": tag}


def given(flags: Sequence[str]) -> list[Layer]:
    """Turns flags of `epp serve` into layers of values. A flag without a value is true. Raises BadValues."""
    layers = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        if not name.startswith("-") or not name.strip("-"):
            raise BadValues(f"'{flag}' behind --: write flags of `epp serve` as --name=value")
        setting = {name.lstrip("-"): value if equals else "true"}
        layers.append(Layer(f"-- {flag}", {"router": {"epp": {"flags": setting}}}))
    return layers


def check(objects: Sequence[Json]) -> list[str]:
    """Returns the warnings that `epp serve` would give in the pod of these objects. Raises BadConfiguration if it would not start."""
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    (container,) = (one for one in deployment["spec"]["template"]["spec"]["containers"] if one["name"] == CONTAINER)
    line = click.command("epp serve")(serve_options(lambda _options: None))
    flags = [*container["args"], *(f"{flag_of(one['name'])}={one['value']}" for one in container["env"] if is_flag(one))]
    names = deployment["metadata"]
    with own_environment():
        context = line.make_context("epp serve", flags)
        pod = {"POD_NAME": f"{names['name']}-0-0", "NAMESPACE": names["namespace"]}
        options, warnings = collect(context.params, pod, {})
    return [*without_registry(container["image"]), *warnings, *check_configuration(objects, container, options)]


def without_registry(reference: str) -> list[str]:
    """Returns a warning if an image name has no registry, because a node would look for it in its default registry."""
    first, slash, _ = reference.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        return []
    return [f"image '{reference}' names no registry, so it must be on the nodes already; give --image REGISTRY/NAME:TAG"]


def check_configuration(objects: Sequence[Json], container: Json, options: Options) -> list[str]:
    """Returns the warnings about the configuration. With --plugin-path, checks nothing, because that folder exists only in the pod."""
    if options.plugin_path:
        return []
    name = options.config_file.rpartition("/")[2]
    text = next(one["data"][name] for one in objects if one["kind"] == "ConfigMap" and name in one["data"])
    limit = container["resources"].get("limits", {}).get("memory")
    surroundings = Surroundings(
        options.scrape_interval_s,
        options.body_bytes_max,
        None if limit is None else int(parse_quantity(str(limit))),
        leader_election=options.ha_enable_leader_election,
    )
    with refusing_errors():
        config = load(text, name, allow_experimental=options.allow_experimental_plugins, surroundings=surroundings)
    return [findings_text([finding]) for finding in config.warnings]


def is_flag(variable: Json) -> bool:
    return variable["name"].startswith(PREFIX) and "value" in variable


def flag_of(variable: str) -> str:
    """Returns the flag that an environment variable sets."""
    return "--" + variable.removeprefix(PREFIX).lower().replace("_", "-")


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """Removes, in this block, the variables of this environment that set flags: the pod does not have them."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(PREFIX) or name == "NAMESPACE"}
    try:
        yield
    finally:
        os.environ.update(kept)

"""`epp config schema`: prints a JSON Schema of the configuration file, for editors.

Write it to a file: epp config schema > epp.config.schema.json
Name that file in the first line of a configuration: # yaml-language-server: $schema=epp.config.schema.json
"""

import json

import click

from epp.config import registry
from epp.config.pools_schema import pools_schema
from epp.config.schema import schema
from workers.cli.configuration import add_plugins, plugin_path_option
from workers.cli.output import echo_text


@click.command("schema")
@click.option("--pools", is_flag=True, help="Print that of a file for --pools-file.")
@plugin_path_option
def command(pools: bool, plugin_path: str) -> None:
    """Print a JSON Schema (2020-12) of the configuration file, with the parameters of every plugin type."""
    if pools:
        echo_text(json.dumps(pools_schema(), indent=2, ensure_ascii=False))
        return
    add_plugins(plugin_path)
    try:
        types = registry.known()
    except registry.PluginImportError as error:
        raise click.ClickException(str(error)) from error
    echo_text(json.dumps(schema(types), indent=2, ensure_ascii=False))

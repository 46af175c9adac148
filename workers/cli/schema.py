"""`epp schema`: a JSON Schema of the configuration file, for editors.

epp schema > epp.schema.json        and as the first line of a file: # yaml-language-server: $schema=epp.schema.json
"""

import json

import click

from epp import registry
from epp.schema import schema
from workers.cli.configuration import add_plugins, plugin_path_option


@click.command("schema")
@plugin_path_option
def command(plugin_path: str) -> None:
    """Print a JSON Schema (2020-12) of the configuration file, with the parameters of every plugin type."""
    add_plugins(plugin_path)
    try:
        types = registry.known()
    except registry.PluginImportError as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(schema(types), indent=2, ensure_ascii=False))

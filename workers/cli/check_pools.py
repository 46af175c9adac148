"""Checks a pools file for `epp config check`, with the configuration of each pool, as `epp serve --pools-file` does."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from epp.config import pools
from epp.config.findings import ConfigError, ConfigErrors, Finding
from epp.config.load import EffectiveConfig
from epp.config.pools import PoolsFile
from workers.cli.configuration import object_findings
from workers.cli.pools import Beside, object_names, own_options, taken
from workers.host.options import Options
from workers.process.loading import PoolText, read_configurations

NAMED_MAX = 20

Load = Callable[[str | None, str], tuple[EffectiveConfig | None, list[Finding]]]


class Used(NamedTuple):
    """A configuration, and the names of the pools that have it."""

    config: EffectiveConfig
    pools: list[str]


def found(text: str, source: str, options: Options, load: Load) -> tuple[list[Used], list[Finding]]:
    """Returns the different configurations, and what is wrong. `load`: returns a configuration and its findings, by text and source."""
    try:
        file = pools.read(text, source)
        file.check_ports(taken(options))
    except ConfigErrors as errors:
        return [], [*errors.warnings, *errors.errors]
    texts, unread = read_configurations(file)
    findings: list[Finding] = [*file.warnings, *unread]
    used: dict[PoolText, Used] = {}
    for given in dict.fromkeys(text for text in texts if text is not None):
        config, more = load(given.text, given.source)
        findings += more
        if config is not None:
            used[given] = Used(config, [])
    findings += _of_pools(file, texts, options, used)
    findings += object_findings(options.objects_dir, object_names(file, options))
    return list(used.values()), findings


def shown(used: Sequence[Used]) -> str:
    """Returns the effective configurations as one YAML text: a document for each, after a comment that names its pools."""
    return "---\n".join(f"# {_title(each)}\n{each.config.as_yaml()}" for each in used)


def _of_pools(file: PoolsFile, texts: Sequence[PoolText | None], options: Options, used: dict[PoolText, Used]) -> Iterator[ConfigError]:
    """Yields what does not fit between a pool and its configuration. Adds the pools to their configurations."""
    beside = Beside()
    for entry, text in zip(file.pools, texts, strict=True):
        if text is None or text not in used:
            continue
        used[text].pools.append(entry.name)
        own, config = own_options(options, entry), used[text].config
        if (wrong := beside.unfit(file.source, entry.name, entry.place, own, config)) is not None:
            yield wrong
        elif config.discovery is None and not entry.endpoints and entry.kube is None:
            hint = "give it 'endpoints', 'poolName' or 'selector', or its configuration a file-discovery plugin"
            why = f"pool '{entry.name}': there is no source of endpoints"
            yield ConfigError(file.source, entry.place.line, entry.place.column, "no-discovery", why, hint)


def _title(used: Used) -> str:
    more = len(used.pools) - NAMED_MAX
    return f"{', '.join(used.pools[:NAMED_MAX])}{f' and {more} more' if more > 0 else ''}: {used.config.source}"

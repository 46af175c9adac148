"""Configurations to replay. A run changes the state of plugins, so each run loads its configuration anew."""

from collections.abc import Mapping

import msgspec

from epp.config.load import DEFAULT_NAME, EffectiveConfig, Surroundings
from epp.plugin import Scorer
from epp.recording.records import Configured
from workers.cli.configuration import load_text, read_file


class Configuration(msgspec.Struct, frozen=True):
    """A configuration that has been loaded once, so it has no errors. `text`: None stands for the built-in one."""

    name: str
    text: str | None
    allow_experimental: bool

    def load(self) -> EffectiveConfig:
        """Returns it with fresh plugins."""
        return load_text(
            self.text, self.name, allow_experimental=self.allow_experimental, surroundings=Surroundings()
        )  # fmt: skip


def configuration(path: str, allow_experimental: bool) -> Configuration:
    """Reads a configuration and checks it; "": the built-in one. Raises BadConfiguration."""
    found = Configuration(path or DEFAULT_NAME, read_file(path) if path else None, allow_experimental)
    found.load()
    return found


def differs(config: Configuration, recorded: Mapping[int, Configured]) -> list[str]:
    """Returns warnings if the profiles of the recording are not those of the configuration that is to stand for it."""
    scorers = {
        profile.name: {(scorer.name, weight) for scorer, weight in profile.members if isinstance(scorer, Scorer)}
        for profile in config.load().pipeline.recipe.profiles
    }
    for each in recorded.values():
        theirs = {profile.name: {(name, weight) for name, weight, _ in profile.scorers} for profile in each.profiles}
        if scorers != theirs:
            return ["the recording has other profiles or weights than --base; give its own configuration"]
    return []

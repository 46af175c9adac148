"""Configurations to replay. Loads configurations anew for each run, because a run changes the state of plugins."""

from collections.abc import Iterator, Mapping

import msgspec

from epp.config.load import DEFAULT_NAME, EffectiveConfig, Surroundings
from epp.plugin import Scorer
from epp.recording.records import Configured
from workers.cli.configuration import load_text, read_file


class Configuration(msgspec.Struct, frozen=True):
    """A configuration that was loaded once before, so it has no errors. `text`: its text; None for the built-in configuration."""

    name: str
    text: str | None
    allow_experimental: bool

    def load(self) -> EffectiveConfig:
        """Returns the configuration with fresh plugins."""
        return load_text(
            self.text, self.name, allow_experimental=self.allow_experimental, surroundings=Surroundings()
        )  # fmt: skip


def configuration(path: str, allow_experimental: bool) -> Configuration:
    """Reads a configuration and checks it; "" means the built-in configuration. Raises BadConfiguration."""
    found = Configuration(path or DEFAULT_NAME, read_file(path) if path else None, allow_experimental)
    found.load()
    return found


Weights = dict[str, dict[str, float]]  # profile -> scorer -> weight


def differs(config: Configuration, recorded: Mapping[int, Configured]) -> list[str]:
    """Returns a warning for each configuration of the recording whose profiles or weights differ from those of the configuration that
    replaces it.
    """
    ours: Weights = {
        profile.name: {scorer.name: weight for scorer, weight in profile.members if isinstance(scorer, Scorer)}
        for profile in config.load().pipeline.wiring.profiles
    }
    warnings = []
    for number, each in sorted(recorded.items()):
        theirs: Weights = {profile.name: {name: weight for name, weight, _ in profile.scorers} for profile in each.profiles}
        if found := "; ".join(_differences(theirs, ours)):
            warnings.append(f"generation {number} ({each.hash}) of the recording is not {config.name}: {found}. --base names its file")
    return warnings


def _differences(theirs: Weights, ours: Weights) -> Iterator[str]:
    """Yields what the recording has and the configuration lacks, and the reverse."""
    for profile in [*theirs, *(name for name in ours if name not in theirs)]:
        if profile not in ours or profile not in theirs:
            yield f"profile '{profile}' is only in {'the recording' if profile in theirs else 'the file'}"
            continue
        before, after = theirs[profile], ours[profile]
        for scorer in [*before, *(name for name in after if name not in before)]:
            if before.get(scorer) != after.get(scorer):
                recorded, given = (f"{each[scorer]:g}" if scorer in each else "none" for each in (before, after))
                yield f"weight of {scorer} in profile '{profile}': {recorded} in the recording, {given} in the file"

"""Profile handlers decide which profiles run, and combine the results into one decision."""

from collections.abc import Mapping, Sequence

from compiled.classes import subclassed
from epp.decision.decision import Decision, ProfileRun
from epp.errors import Cause, Refused
from epp.plugin import Profile, ProfileHandler, plugin
from epp.request import Request


@subclassed
class OneProfile(ProfileHandler):
    """Base class of handlers for configurations with exactly one profile. The profile runs once, and its targets are the result."""

    def check(self, profiles: Sequence[str]) -> str | None:
        if len(profiles) == 1:
            return None
        return f"{self.type_name} runs one profile, but {len(profiles)} are configured: {', '.join(profiles)}"

    def pick(self, request: Request, profiles: Mapping[str, Profile], runs: Mapping[str, ProfileRun | None]) -> Sequence[Profile]:
        return () if runs else tuple(profiles.values())

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        ((name, run),) = runs.items()
        if run is None:
            raise Refused(Cause.NO_ENDPOINT_LEFT)
        return Decision(run.targets, runs, primary=name)


@plugin("single-profile-handler")
class SingleProfile(OneProfile):
    """Runs the only configured profile once; its targets are the result."""

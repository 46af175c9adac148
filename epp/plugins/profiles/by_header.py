"""Run the profile that a request header names."""

from collections.abc import Mapping, Sequence

import msgspec

from epp.decision.decision import Decision, ProfileRun
from epp.errors import Cause, Refused
from epp.plugin import Profile, ProfileHandler, plugin
from epp.request import Request

HEADER = "epp-profile"
DEFAULT_PROFILE = "decode"
NAME_CHARS_SHOWN = 64


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which header names the profile.

    header_name: The request header; empty means `EPP-Profile`.
    default_profile: The profile of requests without the header; empty means `decode`.
    """

    header_name: str = ""
    default_profile: str = ""


@plugin("header-profile-handler")
class HeaderProfile(ProfileHandler):
    """Runs the profile that a request header names, or the default profile if the header is missing.

    If only one profile is configured, it always runs. A request with an unknown profile in its header is refused as the client's mistake.
    With an unknown `defaultProfile`, the picker does not start.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._header = params.header_name.strip().lower() or HEADER
        self.reads_headers = (self._header,)
        self._named = params.default_profile.strip()
        self._default = self._named or DEFAULT_PROFILE

    def check(self, profiles: Sequence[str]) -> str | None:
        if len(profiles) == 1 or not self._named or self._named in profiles:
            return None
        return f"defaultProfile of plugin '{self.name}' is '{self._named}', but the profiles are: {', '.join(profiles)}"

    def idle(self, profiles: Sequence[str]) -> Sequence[str]:
        if len(profiles) == 1 or self._default in profiles:
            return ()
        return (
            f"plugin '{self.name}' uses profile '{self._default}' for requests without header {self._header}, "
            "but there is no such profile, so they are refused; set defaultProfile to another one",
        )

    def pick(self, request: Request, profiles: Mapping[str, Profile], runs: Mapping[str, ProfileRun | None]) -> Sequence[Profile]:
        if runs:
            return ()
        if len(profiles) == 1:
            return tuple(profiles.values())
        wanted = profiles.get(request.headers.get(self._header, "").strip() or self._default)
        return () if wanted is None else (wanted,)

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        for name, run in runs.items():
            if run is not None:
                return Decision(run.targets, runs, primary=name)
        if not runs:
            name = request.headers.get(self._header, "").strip()
            text = f"header {self._header} names '{name[:NAME_CHARS_SHOWN]}', which is no scheduling profile"
            raise Refused(Cause.UNKNOWN_PROFILE, text if name else f"header {self._header} is missing: it names a scheduling profile")
        raise Refused(Cause.NO_ENDPOINT_LEFT)

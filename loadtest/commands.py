"""The commands of the laboratory. `epp` finds them by the entry point `epp.commands` of this distribution."""

from collections.abc import Mapping
from typing import Final

from workers.cli import Entry

COMMANDS: Final[Mapping[str, Entry]] = {
    "demo": Entry("Run the picker with simulated model servers, Envoy and traffic.", "loadtest.demo.command", "lab"),
    "sim": Entry("Run simulated model servers.", "loadtest.sim.command"),
    "size": Entry("Size a picker: cores, memory and flags for a load.", "loadtest.sizing.command"),
    "record replay": Entry("Replay a recording under other configurations, in virtual time.", "loadtest.replay.command"),
    "record tune": Entry("Find weights and parameters that serve recorded traffic better.", "loadtest.tune.command", "lab"),
}

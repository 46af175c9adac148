"""Searches for better values with optuna: each trial replays the training part of a recording under one configuration."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click
import msgspec
import numpy as np

from epp.config import edit, registry, yaml_nodes
from loadtest.replay.configurations import Configuration
from loadtest.replay.figures import HIGHER_IS_BETTER, Condition, Figures, NoAnswer, figures
from loadtest.replay.run import Replay, Run, World
from loadtest.tune.space import Knob, Path, changed, knobs, with_scorers
from workers.cli.flags import BadConfiguration

FINALISTS: Final = 4
FINAL_SEEDS: Final = 3
STARTING_TRIALS: Final = 16  # trials with random values, before optuna learns from earlier trials
MISSING: Final = "epp record tune needs optuna: pip install 'endpoint-picker[analysis]'"

Values = Mapping[Path, float]


class Goal(msgspec.Struct, frozen=True):
    """What to improve: a figure, and conditions in which `base` is the figure of the recorded configuration."""

    objective: str
    limits: Sequence[Condition]

    def cost(self, found: Figures) -> float:
        """Returns the objective as a cost, of which less is better."""
        value: float = getattr(found, self.objective)
        return -value if self.objective in HIGHER_IS_BETTER else value

    def allows(self, found: Figures, base: Figures) -> bool:
        return all(limit.holds(found, base) for limit in self.limits)


class Candidate(msgspec.Struct, frozen=True):
    """Values that were tried. `cost`: infinite if a condition did not hold."""

    values: Values
    cost: float
    figures: Figures | None


class Progress(msgspec.Struct, frozen=True):
    """How far a search has got. `best`: the objective of the best trial so far; `base`: the objective of the recorded configuration."""

    trial: int
    trials: int
    best: float
    base: float
    improved: bool


class Space:
    """A configuration with values to change. `added`: scorers that candidates have besides its own scorers. Raises ValueError."""

    def __init__(self, config: Configuration, text: str, added: Sequence[str] = ()) -> None:
        self.text = text
        self._config = config
        types = registry.known()
        self._document = with_scorers(yaml_nodes.plain(text), added, types) if added else yaml_nodes.plain(text)
        self.knobs = knobs(self._document, types)

    def text_with(self, values: Values) -> str:
        """Returns the text of the configuration with these values; comments and order stay."""
        return edit.rewritten(self.text, changed(self._document, values)) if values else self.text

    def with_values(self, values: Values) -> Configuration:
        return msgspec.structs.replace(self._config, text=self.text_with(values))


class Part:
    """A part of a recording, on which configurations are compared. All runs are compared over the same requests, from `counted_from` on."""

    def __init__(self, world: World, counted_from: int) -> None:
        self.world = world
        self.counted = np.arange(counted_from, len(world.requests))

    def run(self, config: Configuration, seed: int = 0) -> Run:
        return Replay(config.load(), msgspec.structs.replace(self.world, seed=seed)).run()

    def figures(self, run: Run, base: Run | None = None) -> Figures:
        """Computes the figures of a run. Raises NoAnswer."""
        compared = run if base is None else base
        return figures(run, compared.target, len(self.world.endpoints), self.counted)


class Search:
    """One search. `interrupted`: whether Ctrl-C ended the search; the result is then the best one so far."""

    def __init__(self, part: Part, space: Space, goal: Goal, seed: int) -> None:
        self._part = part
        self._space = space
        self._goal = goal
        self._seed = seed
        self.base_run = part.run(space.with_values({}), seed)
        self.base = part.figures(self.base_run)
        self.tried = 0
        self.interrupted = False

    def best(self, trials: int, seconds: float, told: Callable[[Progress], object]) -> Candidate:
        """Runs trials until their number or the time is over. Returns the best candidate; one without values if none beats the base."""
        optuna = _optuna()
        sampler = optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=STARTING_TRIALS, multivariate=True)
        study = optuna.create_study(sampler=sampler)
        study.enqueue_trial({knob.name: knob.now for knob in self._space.knobs})
        none = Candidate({}, self._goal.cost(self.base), self.base)
        found = [none]
        ends = time.monotonic() + seconds
        try:
            while self.tried < trials and time.monotonic() < ends:
                trial = study.ask()
                candidate = self._tried({knob.path: knob.rounded(self._suggest(trial, knob)) for knob in self._space.knobs})
                study.tell(trial, min(candidate.cost, 1e9))
                self.tried += 1
                before = min(each.cost for each in found)
                found.append(candidate)
                least = min(before, candidate.cost)
                told(Progress(self.tried, trials, abs(least), abs(none.cost), improved=least < before))
            return self._final(found)
        except KeyboardInterrupt:
            self.interrupted = True
            return min(found, key=lambda each: each.cost)

    def _suggest(self, trial: Any, knob: Knob) -> float:
        if knob.integer:
            return float(trial.suggest_int(knob.name, int(knob.low), int(knob.high), log=knob.log))
        return float(trial.suggest_float(knob.name, knob.low, knob.high, log=knob.log))

    def _tried(self, values: Values, seed: int | None = None) -> Candidate:
        try:
            run = self._part.run(self._space.with_values(values), self._seed if seed is None else seed)
            found = self._part.figures(run, self.base_run)
        except (BadConfiguration, NoAnswer):
            return Candidate(values, math.inf, None)
        return Candidate(values, self._goal.cost(found) if self._goal.allows(found, self.base) else math.inf, found)

    def _final(self, found: Sequence[Candidate]) -> Candidate:
        """Replays the best candidates with other random numbers, because the best one of many trials was also lucky."""
        ranked = sorted((each for each in found if each.cost < math.inf), key=lambda each: each.cost)[:FINALISTS]
        if not any(not each.values for each in ranked):
            ranked.append(found[0])
        costs = []
        for each in ranked:
            more = [self._tried(each.values, self._seed + 1 + number).cost for number in range(FINAL_SEEDS - 1)]
            costs.append((each.cost + sum(more)) / FINAL_SEEDS)
        return ranked[int(np.argmin(costs))]


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as missing:
        raise click.ClickException(MISSING) from missing
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna

"""Encodes a latency model as bytes, for other processes and for the next run. Raises no error but `UnusableModel`."""

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from epp.errors import UNREADABLE
from epp.learning.endpoint import ERROR_BOUNDS, EndpointModel
from epp.learning.least_squares import LeastSquares
from epp.learning.model import LatencyModel
from epp.learning.speed import LOG_MAX, Speed

VERSION = 3


class UnusableModel(Exception):
    """Says that bytes are not a model that this version can use. The text says why."""


class FitState(msgspec.Struct, array_like=True, frozen=True):
    """The sums of one `LeastSquares`."""

    sums: list[float]
    count: float


class SpeedState(msgspec.Struct, array_like=True, frozen=True):
    """One `Speed`; `fields` has the numbers of SPEED_FIELDS in that order, and `since`."""

    samples: int
    fields: list[float]


class EndpointState(msgspec.Struct, array_like=True, frozen=True):
    """One `EndpointModel`; `fields` has the numbers of FIELDS in that order, then how far the pool's drift fell after the last answer, and
    `computed`.
    """

    slot: int
    generation: int
    speed: SpeedState
    token_speed: SpeedState
    full: int
    fields: list[float]
    errors: list[int]


class ModelState(msgspec.Struct, array_like=True, frozen=True):
    """One `LatencyModel`; `fields` has the numbers of MODEL_FIELDS in that order."""

    version: int
    first: FitState
    per_token: FitState
    fields: list[float]
    trusted: bool
    endpoints: list[EndpointState]


SPEED_FIELDS = ("log", "shift", "spread")
FIELDS = ("learned_at", "error", "batch", "error_sum")
LATER_FIELDS = ("drift_at", "computed")  # earlier versions do not write them; 0 stands for what is missing
MODEL_FIELDS = ("error", "mean_error", "mean_s", "place_s")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ModelState)
_any_decoder = msgspec.msgpack.Decoder(list[Any])  # a model of another version, of which only the beginning is known


def encode(model: LatencyModel) -> bytes:
    """Returns the model as bytes."""
    endpoints = [
        EndpointState(
            known.slot,
            known.generation,
            _speed(known.speed),
            _speed(known.token_speed),
            known.full,
            [*(getattr(known, name) for name in FIELDS), max(0.0, known.drift_at - model.drift), known.computed],
            known.errors,
        )
        for known in model.endpoints.values()
    ]
    fields = [getattr(model, name) for name in MODEL_FIELDS]
    return _encoder.encode(ModelState(VERSION, _fit(model.first), _fit(model.per_token), fields, model.trusted, endpoints))


def decode(data: bytes) -> LatencyModel:
    """Returns the model that `encode` has encoded. Raises UnusableModel."""
    try:
        version = next(iter(_any_decoder.decode(data)), None)
        if version != VERSION:
            raise UnusableModel(f"it has version {version}, and this picker reads version {VERSION}")
        state = _decoder.decode(data)
    except UNREADABLE as problem:
        raise UnusableModel(f"it is damaged: {problem}") from problem
    model = LatencyModel()
    _restore(model.first, state.first)
    _restore(model.per_token, state.per_token)
    _set(model, MODEL_FIELDS, state.fields)
    model.trusted = state.trusted
    for each in state.endpoints:
        if len(each.errors) != len(ERROR_BOUNDS) + 1:
            raise UnusableModel(f"it has {len(each.errors)} classes of errors instead of {len(ERROR_BOUNDS) + 1}")
        known = model.endpoints[each.slot] = EndpointModel(each.slot, each.generation)
        if min(each.full, *each.errors, *each.fields) < 0:
            raise UnusableModel("it has negative numbers")
        _restore_speed(known.speed, each.speed)
        _restore_speed(known.token_speed, each.token_speed)
        known.full = each.full
        missing = [0.0] * (len(FIELDS) + len(LATER_FIELDS) - len(each.fields))
        _set(known, FIELDS + LATER_FIELDS, [*each.fields, *missing])
        known.errors = list(each.errors)
        model.speed_sum += known.speed.log
        model.token_speed_sum += known.token_speed.log
    model.count_limits()
    model.count_speeds()
    return model


def _speed(speed: Speed) -> SpeedState:
    return SpeedState(speed.samples, [*(getattr(speed, name) for name in SPEED_FIELDS), speed.since])


def _restore_speed(speed: Speed, state: SpeedState) -> None:
    since = state.fields[len(SPEED_FIELDS) :] or [float(state.samples)]  # version 0.2.0 does not write this number
    _set(speed, (*SPEED_FIELDS, "since"), [*state.fields[: len(SPEED_FIELDS)], *since])
    speed.samples = state.samples
    if abs(speed.log) > LOG_MAX or min(speed.spread, speed.since, speed.samples) < 0.0:
        raise UnusableModel("it has impossible speeds")


def _fit(fit: LeastSquares) -> FitState:
    return FitState(fit.sums.tolist(), fit.count)


def _restore(fit: LeastSquares, state: FitState) -> None:
    size = len(fit.prior)
    if len(state.sums) != len(fit.sums) or not _finite((*state.sums, state.count)):
        raise UnusableModel("it has another number of coefficients, or they are not finite")
    squares = state.sums[2 * size :: size + 1]  # the other products may be negative, because features may be
    if min(*state.sums[:size], *squares, state.count) < 0.0:
        raise UnusableModel("it has negative coefficients or squares")
    fit.sums[:] = state.sums
    fit.theta = [ratio * prior for ratio, prior in zip(state.sums[:size], fit.prior, strict=True)]
    fit.count = state.count


def _set(target: LatencyModel | EndpointModel | Speed, names: tuple[str, ...], values: list[float]) -> None:
    if len(values) != len(names) or not _finite(values):
        raise UnusableModel("it has another number of values, or they are not finite")
    for name, value in zip(names, values, strict=True):
        setattr(target, name, value)


def _finite(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) for value in values)

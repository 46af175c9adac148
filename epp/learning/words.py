"""Says in words what a model has learned of an endpoint."""

from epp.learning.model import BASE, QUEUE, REST, RUNNING, THOUSAND, UNCACHED, LatencyModel

MS = 1000.0
SMALLEST_MS = 0.0005  # a smaller term is not shown


def terms(model: LatencyModel, slot: int, now: float) -> dict[str, float]:
    """Returns the endpoint's coefficients: how many seconds each unit adds to the time to the first token. `per_output_token` is the time
    per output token. `now`: monotonic seconds.
    """
    speed, theta = model.speed(slot, now), model.first.theta
    return {
        "base": speed * theta[BASE],
        "per_uncached_token": speed * theta[UNCACHED] / THOUSAND,
        "per_token_ahead": speed * theta[REST] / THOUSAND,
        "per_waiting_request": speed * theta[QUEUE] * model.place_s / max(1.0, model.limit(slot)),
        "per_running_request": speed * theta[RUNNING],
        "per_output_token": model.per_token_s(slot, 1.0),
    }


def in_words(model: LatencyModel, slot: int, now: float) -> str:
    """Returns for example "38 ms + 0.31 ms per uncached token + 212 ms per waiting request, 3.1 times the pool's mean"."""
    found = terms(model, slot, now)
    parts = [f"{_ms(found['base'])} ms"]
    for name, seconds in found.items():
        counts = name != "per_waiting_request" or model.limit(slot) > 0.0
        if name not in ("base", "per_output_token") and seconds * MS >= SMALLEST_MS and counts:
            parts.append(f"{_ms(seconds)} ms {name.replace('_', ' ')}")
    text = " + ".join(parts)
    speed = model.speed(slot, now)
    if speed >= 1.25 or speed <= 0.8:
        text += f", {speed:.1f} times the pool's mean"
    if limit := model.limit(slot):
        text += f", at most {limit:.0f} running"
    known = model.endpoints.get(slot)
    return text if known is not None and known.samples else f"{text} (the pool's mean: no answer yet)"


def _ms(seconds: float) -> str:
    value = seconds * MS
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"

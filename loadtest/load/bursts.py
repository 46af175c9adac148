"""Sends load in bursts: all users of `loadtest/load/locustfile.py` in the first quarter of each period, and a third of them in the rest.

Usage: `locust -f loadtest/bursts.py -H http://GATEWAY --run-time 2m -u 60 Chat`; `-u` is the number of users at the peak.
"""

from typing import Final

from locust import LoadTestShape

from loadtest.load.locustfile import Adapters, Chat, Documents, GatewayUser, Tenants

__all__ = ["Adapters", "Bursts", "Chat", "Documents", "GatewayUser", "Tenants"]

PERIOD_S: Final = 20.0
BURST_SHARE: Final = 0.25
QUIET_SHARE: Final = 1 / 3
PEAK_DEFAULT: Final = 30
SPAWN_RATE: Final = 1_000.0  # users per second: high, so that all of them start at once


class Bursts(LoadTestShape):
    """Tells locust the number of users at each moment."""

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        assert options is not None
        run_time = self.get_run_time()
        if options.run_time and run_time > options.run_time:
            return None
        peak = options.num_users or PEAK_DEFAULT
        bursting = run_time % PERIOD_S < BURST_SHARE * PERIOD_S
        return (peak if bursting else max(1, round(QUIET_SHARE * peak))), SPAWN_RATE

"""What every test runs under: one thread per library, and generated examples that do not depend on how busy the machine is."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported: tests that fork want a single thread

from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    deadline=None,  # a shared machine makes any limit per example flaky; a hang ends by pytest-timeout
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile(
    "ci",
    parent=settings.get_profile("default"),
    derandomize=True,  # the same commit gives the same result
    database=None,
)
settings.load_profile("ci" if os.environ.get("CI") else "default")

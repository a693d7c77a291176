"""What holds for every test: a machine may stall for seconds at any place, and no test fails of that.

hypothesis draws the same examples in every run and measures no time; `make fuzz` looks for new ones.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")

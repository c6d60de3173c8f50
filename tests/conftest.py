"""Shared by all tests: single-threaded torch, the hypothesis profile, the count of parity cases."""

from __future__ import annotations

import hypothesis
import pytest
import torch

from shardfield import testing

torch.set_num_threads(1)

# Ranks share few cores, so one example's time says nothing about the code under test.
hypothesis.settings.register_profile(
    "shardfield",
    deadline=None,
    max_examples=30,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("shardfield")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"parity cases: {testing.cases_run()}")


def pytest_sessionfinish() -> None:
    testing.close_pools()

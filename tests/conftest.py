"""Shared by all tests: one thread, what ranks import, hypothesis profiles, the count of cases.

`make test` draws a few examples of each property; `make conformance` (`CONFORMANCE=1`) draws 300 or
more, and runs the tests marked `conformance` too.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

from shardfield import testing

torch.set_num_threads(1)

# What compiling imports when it is first called, once in the process that ranks fork from.
testing.preload(
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "torch._dynamo.repro.after_dynamo",
    "torch.distributed.tensor.experimental",
    "torch.utils.cpp_extension",
)

# Ranks share few cores, so one example's time says nothing about the code under test.
hypothesis.settings.register_profile(
    "shardfield",
    deadline=None,
    max_examples=300 if os.environ.get("CONFORMANCE") else 30,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("shardfield")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("CONFORMANCE"):
        return
    long = [item for item in items if item.get_closest_marker("conformance")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"parity cases: {testing.cases_run()}")


def pytest_sessionfinish() -> None:
    testing.close_pools()

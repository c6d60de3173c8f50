"""The benchmark: one command, one table (`shardfield bench`, or `python -m benchmarks`)."""

from shardfield.tools.bench.command import bench

__all__ = ["bench"]

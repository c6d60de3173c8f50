"""`python -m benchmarks`: the same as `shardfield bench`."""

import typer

from shardfield.tools.bench import bench

if __name__ == "__main__":
    typer.run(bench)

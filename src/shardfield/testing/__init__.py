"""The parity harness: live ranks, and the checks every sharded operation has to pass."""

from shardfield.testing.cases import split_cases
from shardfield.testing.parity import ParityError, Report, cases_run, parity, refused
from shardfield.testing.pool import RankError, RankPool, close_pools, preload, rank_pool
from shardfield.testing.worker import Rank

__all__ = [
    "ParityError",
    "Rank",
    "RankError",
    "RankPool",
    "Report",
    "cases_run",
    "close_pools",
    "parity",
    "preload",
    "rank_pool",
    "refused",
    "split_cases",
]

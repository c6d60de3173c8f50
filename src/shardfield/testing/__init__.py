"""The parity harness: live ranks, and the checks every sharded operation has to pass."""

from shardfield.testing.pool import RankError, RankPool, close_pools, rank_pool
from shardfield.testing.worker import Rank

__all__ = ["Rank", "RankError", "RankPool", "close_pools", "rank_pool"]

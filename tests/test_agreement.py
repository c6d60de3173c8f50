"""Failure agreement: a rank that fails, leaves or strays ends the call on all ranks, by name."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from shardfield.comm import agreement
from shardfield.errors import RankFailure
from shardfield.testing import RankError, RankPool, rank_pool


def reduce(name="all_reduce", operation="conv2d", signature=None, group=None):
    ones = torch.ones(2)
    with agreement.collective(name, group or dist.group.WORLD, operation, signature):
        dist.all_reduce(ones, group=group)
    return float(ones[0])


def fails(function, ranks=3, **options):
    """The error of a call, the seconds it took, and whether the pool still works after it."""
    pool = rank_pool(ranks)
    pool.run(lambda rank: rank.rank)
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(function, **options)
    taken = time.monotonic() - started
    assert pool.run(lambda rank: reduce()) == [float(ranks)] * ranks
    return caught.value, taken


def test_case_33_rank_that_raises_alone_ends_the_call_on_all():
    def alone(rank):
        reduce()
        if rank.rank == 1:
            raise ValueError("disk full")
        reduce(operation="linear")

    error, taken = fails(alone)
    assert taken < 5
    assert error.failures[1].kind == "ValueError"
    assert 'raise ValueError("disk full")' in error.failures[1].trace
    for rank in (0, 2):
        assert error.failures[rank].kind == "RankFailure"
        assert "all_reduce of linear" in error.failures[rank].text
        assert "rank 1 raised ValueError: disk full" in error.failures[rank].text
    assert str(error).startswith("rank 1 of 3: ValueError: disk full")


def test_case_33_rank_that_skips_a_collective_is_named_at_the_next():
    def skip(rank):
        if rank.rank != 2:
            reduce(operation="conv2d")
        reduce(operation="linear")

    error, taken = fails(skip)
    assert taken < 5
    assert sorted(error.failures) == [0, 1, 2]
    for failure in error.failures.values():
        assert failure.kind == "RankFailure"
        assert (
            "rank 1 is at all_reduce of conv2d; rank 2 is at all_reduce of linear" in failure.text
        )


def test_case_33_only_one_rank_calls():
    def only(rank):
        if rank.rank == 0:
            reduce(operation="conv2d")

    error, taken = fails(only)
    assert taken < 5
    assert sorted(error.failures) == [0]
    assert "all_reduce of conv2d" in error.failures[0].text
    assert "ended its part of the call" in error.failures[0].text


def test_case_33_rank_that_stays_away_is_named_within_the_limit():
    def away(rank):
        if rank.rank == 0:
            time.sleep(60)
        reduce(operation="conv2d")

    with RankPool(2, grace=0.5) as pool:
        pool.run(lambda rank: rank.rank)
        started = time.monotonic()
        with pytest.raises(RankError) as caught:
            pool.run(away, timeout=2)
        assert time.monotonic() - started < 10
        assert "rank 0 did not come within 1 s" in caught.value.failures[1].text
        assert caught.value.failures[0].kind == "hang"
        assert "time.sleep(60)" in caught.value.failures[0].trace
        assert pool.run(lambda rank: reduce()) == [2.0, 2.0]


def test_a_rank_that_comes_late_within_the_limit_of_its_call_fails_nothing():
    def late(rank):
        if rank.rank == 1:
            time.sleep(2)  # as one that compiles for longer does
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    with RankPool(2, timeout=1) as pool:
        assert pool.run(late, timeout=60) == [2.0, 2.0]


def test_ranks_that_disagree_on_the_layout_do_not_communicate():
    def disagree(rank):
        reduce(signature=("rows", 4 + rank.rank))

    error, _ = fails(disagree, ranks=2)
    for failure in error.failures.values():
        assert "('rows', 4)" in failure.text
        assert "('rows', 5)" in failure.text


def test_rank_that_dies_is_named_and_replaced():
    def die(rank):
        if rank.rank == 1:
            os._exit(7)
        reduce(operation="conv2d")

    error, taken = fails(die)
    assert taken < 10
    assert error.failures[1].kind == "death"
    assert "code 7" in error.failures[1].text
    assert "rank 1 died" in error.failures[0].text


def test_hang_outside_the_agreement_names_where_each_rank_is():
    def hang(rank):
        if rank.rank == 0:
            with agreement.waiting("barrier", dist.group.WORLD, "batch_norm"):
                dist.barrier()
        else:
            raise ValueError("alone")

    with RankPool(2, grace=0.5) as pool:
        with pytest.raises(RankError) as caught:
            pool.run(hang)
        failure = caught.value.failures[0]
        assert failure.kind == "hang"
        assert failure.follows
        assert failure.operation == "barrier of batch_norm"
        assert "dist.barrier()" in failure.trace
        assert pool.run(lambda rank: reduce()) == [2.0, 2.0]


def test_failure_of_one_rank_reaches_a_group_it_is_not_in():
    def chain(rank):
        mesh = rank.mesh(h=2, w=2)
        if rank.rank == 3:
            raise ValueError("alone")
        for axis in ("h", "w"):
            reduce(operation=axis, group=mesh.get_group(axis))

    error, taken = fails(chain, ranks=4)
    assert taken < 5
    assert error.failures[3].kind == "ValueError"
    # Rank 0 shares no group with rank 3; it hears of it through ranks 1 and 2, if at all.
    assert set(error.failures) >= {1, 2, 3}


def test_off_it_communicates_nothing_and_names_the_operation_of_a_transport_error():
    def off(rank):
        agreement.disable()
        texts = []
        for error in (RuntimeError("Connection closed by peer"), NotImplementedError("mine")):
            try:
                with agreement.waiting("all_to_all", dist.group.WORLD, "roll"):
                    raise error
            except RankFailure as failure:
                texts.append(str(failure))
            except NotImplementedError as failure:
                texts.append(str(failure))
        return agreement.enabled(), reduce(signature=rank.rank), texts

    for enabled, total, texts in rank_pool(2).run(off):
        assert not enabled
        assert total == 2.0
        assert texts[0].startswith("all_to_all of roll over ranks [0, 1] cannot take place")
        assert "Connection closed by peer" in texts[0]
        assert texts[1] == "mine"


def test_environment_turns_it_on_and_an_uncaught_exception_is_published():
    def from_environment(rank):
        agreement.disable()
        earlier = sys.excepthook
        os.environ["SHARDFIELD_AGREEMENT"] = "1"
        try:
            agreement.enable_from_environment()
            assert reduce() == 2.0
            if rank.rank == 1:
                sys.excepthook(ValueError, ValueError("alone"), None)
                return ""
            with pytest.raises(RankFailure) as caught:
                reduce(operation="conv2d")
            return str(caught.value)
        finally:
            sys.excepthook = earlier
            del os.environ["SHARDFIELD_AGREEMENT"]

    text = rank_pool(2).run(from_environment)[0]
    assert text.startswith("all_reduce of conv2d over ranks [0, 1] cannot take place")
    assert "rank 1 raised ValueError: alone" in text


def test_transport_error_of_a_rank_that_dies_is_named_when_off():
    def die(rank):
        agreement.disable()
        reduce()
        if rank.rank == 1:
            os._exit(3)
        reduce(operation="conv2d")

    error, _ = fails(die, ranks=2)
    assert error.failures[0].kind == "RankFailure"
    assert "all_reduce of conv2d" in error.failures[0].text

"""Embeddings: rows of a table, picked by split indices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.testing import parity, rank_pool, refused

G = torch.Generator().manual_seed(0)
INDICES = torch.randint(7, (2, 9, 4), generator=G)
TABLE = torch.randn(7, 5, generator=G)
ONCE = {"dtype": torch.float64, "ranks": (1, 2, 3), "subgroup": False}


def looked_up(indices, table):
    return F.embedding(indices, table, padding_idx=-1) * 2.0


@pytest.mark.parametrize("split", [0, 1, {1: "h", 2: "w"}], ids=str)
def test_split_indices_pick_rows_of_a_whole_table(split):
    parity(looked_up, [INDICES, TABLE], [split, None], compiled=split == 1, **ONCE)


@pytest.mark.parametrize("splits", [[None, 1], [{1: "h"}, {1: "w"}]], ids=str)
def test_a_table_of_split_columns(splits):
    parity(looked_up, [INDICES, TABLE], splits, **ONCE)


@pytest.mark.parametrize("splits", [[None, 0], [{1: "h"}, {0: "w"}]], ids=str)
def test_a_table_of_split_rows(splits):
    parity(looked_up, [INDICES, TABLE], splits, compiled=splits[0] is None, **ONCE)


@pytest.mark.parametrize("index", [-1, 7])
def test_an_index_outside_a_table_of_split_rows_is_refused(index):
    def body(rank):
        table = sf.distribute_tensor(TABLE, rank.mesh(domain=2), [Shard(0)], None)
        with pytest.raises(IndexError, match="7 rows"):
            F.embedding(torch.tensor([0, index]), table)

    rank_pool(2).run(body)


def test_the_module():
    parity(nn.Embedding(7, 5), [INDICES], [1], **ONCE)


REFUSED = {
    "one mesh axis splits the indices and the table": ([1, 0], {}),
    "one mesh axis splits": ([1, 1], {}),
    "scaled by how often": ([None, 0], {"scale_grad_by_freq": True}),
    "by how often an index occurs": ([1, None], {"scale_grad_by_freq": True}),
    "is sparse": ([1, None], {"sparse": True}),
    "embedding_renorm_": ([1, None], {"max_norm": 1.0}),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_is_refused(rule):
    splits, options = REFUSED[rule]
    refused(lambda i, t: F.embedding(i, t, **options), [INDICES, TABLE], splits, match=rule)

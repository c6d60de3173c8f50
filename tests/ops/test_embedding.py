"""Embeddings: rows of a table, picked by split indices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardfield.testing import parity, refused

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


def test_the_module():
    parity(nn.Embedding(7, 5), [INDICES], [1], **ONCE)


REFUSED = {
    "the rows of its table are split": ([None, 0], {}),
    "one mesh axis splits": ([1, 1], {}),
    "scaled by how often": ([1, None], {"scale_grad_by_freq": True}),
    "is sparse": ([1, None], {"sparse": True}),
    "embedding_renorm_": ([1, None], {"max_norm": 1.0}),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_is_refused(rule):
    splits, options = REFUSED[rule]
    refused(lambda i, t: F.embedding(i, t, **options), [INDICES, TABLE], splits, match=rule)

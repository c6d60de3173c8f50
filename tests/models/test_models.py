"""Models of other packages, unmodified, train on shards as in one process."""

from __future__ import annotations

from functools import lru_cache

import pytest
from models import document, table, training
from models.refused import REFUSED

from shardfield.testing import RankError, rank_pool

ATOL = 1e-10
LIMIT = 300.0

KEYS = [
    pytest.param(key, marks=pytest.mark.conformance) if model.long else key
    for key, model in table.MODELS.items()
]


@lru_cache(maxsize=1)
def expected(key: str) -> training.Values:
    if table.MODELS[key].drawn:
        ((values, _),) = rank_pool(1).run(training.on_ranks, key, timeout=LIMIT)
    else:
        (values,) = rank_pool(1).run(training.alone, key, timeout=LIMIT)
    assert values is not None
    return values


def compare(key: str, ranks: int, backend: str = "") -> None:
    exact = expected(key)
    answers = rank_pool(ranks).run(training.on_ranks, key, backend, timeout=LIMIT)
    assert all(same for _, same in answers), "the ranks disagree"
    found = answers[0][0]
    assert found is not None and found.keys() == exact.keys()
    wrong = {}
    for name, value in exact.items():
        assert found[name].shape == value.shape, name
        if value.numel():
            error = float((found[name].double() - value.double()).abs().max())
            if not error <= ATOL * max(1.0, float(value.abs().max())):
                wrong[name] = error
    assert not wrong, f"off by {wrong}"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("key", KEYS)
def test_two_steps_and_inference_equal_one_process(key: str, ranks: int) -> None:
    compare(key, ranks)


@pytest.mark.parametrize("key", REFUSED)
def test_what_does_not_run_yet_names_the_operation(key: str) -> None:
    with pytest.raises(RankError, match=f"UnsupportedOperation in .*{REFUSED[key][1]}"):
        rank_pool(2).run(training.refused, key)


def test_the_page_of_models_is_what_the_tables_say() -> None:
    assert document.PAGE.read_text() == document.page(), "in tests/: python -m models.document"


@pytest.mark.conformance
@pytest.mark.parametrize(
    "key", [key for key, model in table.MODELS.items() if model.whole and not model.drawn]
)
def test_compiled_training_equals_one_process(key: str) -> None:
    compare(key, 2, "aot_eager")

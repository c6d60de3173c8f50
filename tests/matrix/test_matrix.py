"""Every two of mesh, network and activations together, 20 steps against one process."""

from __future__ import annotations

import pytest

from matrix.cells import ALL, LIMIT, Cell, every_pair, run
from matrix.document import PAGE, rows


@pytest.mark.parametrize("cell", every_pair(), ids=" | ".join)
def test_twenty_steps_equal_one_process(cell: Cell) -> None:
    outcome = run(cell)
    assert outcome.loss < LIMIT
    assert outcome.parameters < LIMIT


def test_the_subset_has_every_pair() -> None:
    chosen = every_pair()
    for one, other in ((0, 1), (0, 2), (1, 2)):
        pairs = {(cell[one], cell[other]) for cell in ALL}
        assert {(cell[one], cell[other]) for cell in chosen} == pairs


def test_the_page_shows_every_cell() -> None:
    assert set(rows(PAGE.read_text())) == {cell.mesh for cell in ALL}

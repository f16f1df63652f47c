"""Every architecture of docs/models.md trains as its row there says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architectures import ARCHITECTURES, documented, outcome, row, table

ROWS = documented().splitlines(keepends=True)[3:-1]


TRAINED = ("GPT-2", "Llama", "BERT", "T5")
"""test_exactness trains these, too: their rows are slow."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in TRAINED else ()) for n in ARCHITECTURES],
)
def test_three_steps_are_as_documented(name: str, tmp_path: Path) -> None:
    """To change a row: ``python -m tests.architectures`` writes the table."""
    assert row(name, outcome(name, tmp_path)) in ROWS


def test_the_table_has_a_row_for_each_and_no_other() -> None:
    assert [r.split(" | ")[0].removeprefix("| ") for r in ROWS] == list(ARCHITECTURES)
    assert documented() == table(ROWS)

"""Notebooks that take minutes run from their first cell to their last.

make bench
"""

import pytest

from tests.test_notebooks import DEAR, NOTEBOOKS, executed


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore")  # what Jupyter's own client warns of
@pytest.mark.parametrize("name", DEAR)
def test_notebook_runs(name: str) -> None:
    (path,) = [path for path in NOTEBOOKS if path.stem == name]
    executed(path)

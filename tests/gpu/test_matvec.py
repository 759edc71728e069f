"""A few rows times a matrix on a real GPU, see matvec_checks.py."""

import pytest

from tests.gpu import matvec_checks as checks

pytestmark = pytest.mark.gpu
WATCHDOG = 180
EDGES, RELEASED = list(checks.edges()), list(checks.released((1, 5)))


@pytest.mark.parametrize("number", range(len(EDGES)))
def test_edges(number, count_case):
    shape, options = EDGES[number]
    checks.check(number, *shape, **options, repeats=20)
    count_case()


@pytest.mark.parametrize("number", range(len(RELEASED)))
def test_released_shapes(number, count_case):
    checks.check(number, *RELEASED[number])
    count_case()

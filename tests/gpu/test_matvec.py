"""A few rows times a matrix on a real GPU, see matvec_checks.py."""

import faulthandler

import jax
import pytest

from tests.gpu import matvec_checks as checks

pytestmark = pytest.mark.gpu
EDGES, RELEASED = list(checks.edges()), list(checks.released((1, 5)))


@pytest.fixture(autouse=True)
def gpu():
    """A warpgroup that waits for data that never comes hangs; a hang must end the run."""
    if jax.default_backend() != "gpu":
        pytest.fail("needs a GPU")
    faulthandler.dump_traceback_later(180, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("number", range(len(EDGES)))
def test_edges(number, count_case):
    shape, options = EDGES[number]
    checks.check(number, *shape, **options, repeats=20)
    count_case()


@pytest.mark.parametrize("number", range(len(RELEASED)))
def test_released_shapes(number, count_case):
    checks.check(number, *RELEASED[number])
    count_case()

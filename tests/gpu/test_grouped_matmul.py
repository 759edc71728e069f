"""The grouped matrix product on a real GPU, see grouped_matmul_checks.py."""

import faulthandler

import jax
import pytest

from tests.gpu import grouped_matmul_checks as checks

pytestmark = pytest.mark.gpu
CASES, EXPERTS = list(checks.cases()), list(checks.expert_cases())


@pytest.fixture(autouse=True)
def gpu():
    """A warpgroup that waits for data that never comes hangs; a hang must end the run."""
    if jax.default_backend() != "gpu":
        pytest.fail("needs a GPU")
    faulthandler.dump_traceback_later(180, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("number", range(len(CASES)))
def test_grouped_matmul(number, count_case):
    shape, options = CASES[number]
    checks.check(number, shape, **options, repeats=20)
    count_case()


@pytest.mark.parametrize("number", range(len(EXPERTS)))
def test_experts(number, count_case):
    checks.check_experts(number, *EXPERTS[number], repeats=20)
    count_case()

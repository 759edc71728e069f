"""The grouped matrix product on a real GPU, see grouped_matmul_checks.py."""

import pytest

from tests.gpu import grouped_matmul_checks as checks

pytestmark = pytest.mark.gpu
WATCHDOG = 180
CASES, EXPERTS = list(checks.cases()), list(checks.expert_cases())


@pytest.mark.parametrize("number", range(len(CASES)))
def test_grouped_matmul(number, count_case):
    shape, options = CASES[number]
    checks.check(number, shape, **options, repeats=20)
    count_case()


@pytest.mark.parametrize("number", range(len(EXPERTS)))
def test_experts(number, count_case):
    checks.check_experts(number, *EXPERTS[number], repeats=20)
    count_case()

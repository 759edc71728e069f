"""Kernels of a decode step on a real GPU, see decode_kernel_checks.py."""

import pytest

from tests.gpu import decode_kernel_checks as checks

pytestmark = pytest.mark.gpu
WATCHDOG = 120
CASES = list(checks.cases())
ATTENTION_CASES = list(checks.attention_cases())


@pytest.mark.parametrize("number", range(len(CASES)))
def test_mamba_step(number, count_case):
    shape, rows, dtype, state_dtype, options = CASES[number]
    checks.check_mamba_step(number, shape, rows, dtype, state_dtype, **({"repeats": 20} | options))
    count_case()


@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("hidden", [200, 2688, 4096, 8192])
@pytest.mark.parametrize("dtype, residual", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")])
def test_rms_norm(tokens, hidden, dtype, residual, count_case):
    checks.check_rms_norm(tokens, tokens, hidden, dtype, residual, repeats=20)
    count_case()


@pytest.mark.parametrize("number", range(len(ATTENTION_CASES)))
def test_decode_attention(number, count_case):
    heads, slots, lengths, options = ATTENTION_CASES[number]
    checks.check_decode_attention(number, heads, slots, lengths, **({"repeats": 20} | options))
    count_case()


def test_decode_attention_beyond_32_bits(count_case):
    checks.check_beyond_32_bits()
    count_case()

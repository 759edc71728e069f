"""The kernels that use their peers' memory, interpreted on the CPU: values, late devices, reused memory, races."""

import functools

import pytest

from pallas_kernels.allreduce_rms_norm.one_shot import one_shot
from pallas_kernels.allreduce_rms_norm.two_shot import two_shot
from tests.pallas_kernels import allreduce_cases as cases
from tests.pallas_kernels.interpreter import interpreter, races_found

KERNELS = {"one_shot": one_shot, "two_shot": two_shot}


def call(kernel, case, interpret, max_blocks=None):
    function = functools.partial(
        KERNELS[kernel],
        axis_name="tensor",
        world=case.world,
        eps=cases.EPS,
        unit_offset=case.unit_offset,
        out_dtype=case.partial.dtype,
        max_blocks=max_blocks,
        interpret=interpret,
    )
    return cases.run(case, function, check_vma=False)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "world, tokens, hidden, max_blocks, dtype, residual, weight, unit_offset",
    [
        (
            2,
            1,
            192,
            None,
            "bfloat16",
            "bfloat16",
            "bfloat16",
            False,
        ),  # fewer tokens than devices, one window and a half
        (2, 7, 2688, 2, "bfloat16", "float32", "float32", True),  # several rows a block, uneven; residual in float32
        (3, 9, 1032, 1, "bfloat16", "bfloat16", "float32", False),  # more rows a block than slots; odd world
        (4, 5, 3136, 2, "float16", "float16", "bfloat16", False),
        (8, 3, 136, None, "float32", "float32", "float32", True),
        (8, 17, 256, 2, "float32", "bfloat16", "float32", False),
    ],
)
def test_values(kernel, world, tokens, hidden, max_blocks, dtype, residual, weight, unit_offset, count_case):
    case = cases.problem(
        7, world, tokens, hidden, dtype=dtype, residual=residual, weight=weight, unit_offset=unit_offset
    )
    with interpreter() as interpret:
        cases.check(case, *call(kernel, case, interpret, max_blocks))
    count_case()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_late_devices_and_reused_inputs(kernel, late, count_case):
    """A device that is done has its partial overwritten while a late one still wants to read it."""
    case = cases.problem(11 + late, 3, 5, 256)
    with interpreter(delays={late: 0.4, (late + 1) % 3: 0.2}, poison=True) as interpret:
        cases.check(case, *call(kernel, case, interpret, 2))
    count_case()


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_races(kernel, count_case):
    case = cases.problem(13, 2, 3, 256)
    with interpreter(detect_races=True) as interpret:
        cases.check(case, *call(kernel, case, interpret, 1))
        assert not races_found()
    count_case()


@pytest.mark.parametrize("kernel", KERNELS)
def test_leaving_early_is_noticed(kernel, monkeypatch):
    """The test above can fail: without the exit wait a late device reads what is overwritten, or misses results."""
    from pallas_kernels.allreduce_rms_norm.signals import Peers

    monkeypatch.setattr(Peers, "wait_all", lambda self, semaphore: None)
    case = cases.problem(17, 2, 4, 256)
    with interpreter(delays={1: 0.5}, poison=True) as interpret, pytest.raises(AssertionError):
        cases.check(case, *call(kernel, case, interpret))

"""allreduce_rms_norm on real GPUs, one process for all of them: `pytest --gpu tests/gpu`. One GPU has nothing to sum;
several ranks on one GPU run the same checks through scripts/launch_local.py, see allreduce_checks.py."""

import jax
import pytest

from tests.gpu import allreduce_checks as checks

pytestmark = pytest.mark.gpu
WATCHDOG = 120
CHECKS = list(
    checks.plan(("gather", "one_shot", "two_shot", "flags"), (0, 1, 3, 133), (192, 3136, 8192), None, quick=False)
)


@pytest.fixture(scope="module")
def mesh():
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.fail("needs two GPUs in one process; for ranks that share one: scripts/launch_local.py")
    return checks.world_mesh()


@pytest.mark.parametrize("label, check", CHECKS, ids=[label.replace(" ", "-") for label, _ in CHECKS])
def test_check(label, check, mesh, count_case):
    count_case(check(mesh))

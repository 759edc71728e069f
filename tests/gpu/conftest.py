"""What every test on a GPU needs."""

import faulthandler

import jax
import pytest


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest):
    """A block that waits for data or for others that never come hangs; a hang must end the run, after the seconds that
    the module's WATCHDOG says."""
    if jax.default_backend() != "gpu":
        pytest.fail("needs a GPU")
    faulthandler.dump_traceback_later(request.module.WATCHDOG, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()

"""Set-up of every test run: the devices, which tests run, and the count of comparison cases.

``count_case`` is how a test says that it compared something. The sum is printed at the end ("N cases ran"), and a run
that collected comparing tests but compared nothing fails: a grid that shrank to nothing must not look like success.
"""

import os
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny"
_CASES = pytest.StashKey[int]()
_COUNTING = pytest.StashKey[bool]()
_PROBLEM = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nemotron-jax")
    group.addoption("--full", action="store_true", help="also run the tests marked slow or full")
    group.addoption("--gpu", action="store_true", help="leave JAX its GPUs and also run the tests marked gpu")
    group.addoption("--thin", type=int, metavar="N", help="run at most N of the parametrised cases of each test")
    group.addoption("--min-cases", type=int, default=0, metavar="N", help="fail when fewer than N cases were compared")
    group.addoption("--torch-python", metavar="PATH", help="a Python with torch and transformers: runs tests/pytorch")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CASES] = 0
    if not config.getoption("--gpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    # Before anything asks for devices: the number cannot change afterwards. It concerns only the CPU platform.
    jax.config.update("jax_num_cpu_devices", 8)
    if not config.getoption("--gpu"):
        jax.config.update("jax_disable_most_optimizations", True)  # of the CPU's code generator: tests mostly compile


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path == Path(__file__).parent / "pytorch" and not config.getoption("--torch-python"):
        asked_for = any("pytorch" in str(arg) for arg in config.invocation_params.args)
        return None if asked_for else True  # asked for by name: its fixture says what is missing
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set()
    if not config.getoption("--full"):
        left_out |= {"slow", "full"}
    if not config.getoption("--gpu"):
        left_out |= {"gpu"}
    kept = [item for item in items if not left_out & {mark.name for mark in item.iter_markers()}]
    if most := config.getoption("--thin"):
        kept = _thinned(kept, most)
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def _thinned(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Of each test's cases the first, the last and some evenly between: a short run that leaves out no test."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = set()
    for cases in functions.values():
        count = min(most, len(cases))
        kept |= {cases[round(i * (len(cases) - 1) / max(count - 1, 1))] for i in range(count)}
    return [item for item in items if item in kept]


@pytest.fixture
def count_case(request: pytest.FixtureRequest):
    """A function to call once for each comparison made: ``count_case()``, or ``count_case(n)`` for n at once."""

    def count(cases: int = 1) -> None:
        request.config.stash[_CASES] += cases

    return count


def _counting_tests_ran(session: pytest.Session) -> bool:
    return any("count_case" in getattr(item, "fixturenames", ()) for item in getattr(session, "items", ()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """A worker of pytest-xdist ended: take over its count."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[_CASES] += output.get("cases", 0)
    if output.get("counting"):
        node.config.stash[_COUNTING] = True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    cases, counting = config.stash[_CASES], _counting_tests_ran(session) or config.stash.get(_COUNTING, False)
    if hasattr(config, "workeroutput"):
        config.workeroutput["cases"], config.workeroutput["counting"] = cases, counting
        return
    wanted = max(config.getoption("--min-cases"), int(counting))
    if cases < wanted and not config.getoption("--collect-only"):
        config.stash[_PROBLEM] = f"only {cases} comparison cases ran, at least {wanted} were expected"
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    terminalreporter.write_line(f"{config.stash[_CASES]} cases ran")
    if problem := config.stash.get(_PROBLEM, None):
        terminalreporter.write_line(f"ERROR: {problem}", red=True)

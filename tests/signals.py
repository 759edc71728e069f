"""How programs that tests start take Ctrl-C."""

import contextlib
import signal
from collections.abc import Generator


@contextlib.contextmanager
def sigint(handler=signal.default_int_handler) -> Generator[None]:
    """Programs started inside hear Ctrl-C, or with SIG_IGN ignore it, whatever pytest's workers do.

    Not by ``preexec_fn``: that forks this process, of which JAX warns, and warnings are errors here.
    """
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

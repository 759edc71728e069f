"""Ctrl-C ends the program: always, within seconds, with one line and status 130.

Python alone does not promise that. It raises KeyboardInterrupt wherever the main thread happens to be: in a callback of
the garbage collector or in a destructor the exception is printed and forgotten and the run goes on, and while the main
thread waits inside a library nothing happens at all. So a thread listens too:

* While a command runs, the first Ctrl-C raises KeyboardInterrupt, so that what is open is put away. Where that
  exception is lost, where the program has not ended GRACE seconds later, and at a second Ctrl-C, it ends on the spot.
* Before that, while modules are imported, and after it there is nothing to put away: it ends on the spot.

A process that has joined others (processes.py) tells them first, and listens to SIGTERM in the same way.

Nothing heavy is imported here: this is the first module that the program loads.
"""

import _thread
import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

GRACE = 3.0  # seconds to put away what is open
LINES = {signal.SIGINT: "nemotron-jax: interrupted\n", signal.SIGTERM: "nemotron-jax: asked to end\n"}

_listener: "_Listener | None" = None


def install() -> None:
    """Listen to Ctrl-C from here on: ends the program on the spot, until :func:`run`.

    Does nothing where Ctrl-C is ignored (a job in the background of a script), or outside of the main thread.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        _listen_to(signal.SIGINT, unwinding=False)


def run(command: Callable[[], int]) -> int:
    """What ``command()`` returns, if no Ctrl-C comes. One that comes ends the program, with status 130."""
    here = _listener
    if here is None:
        return command()
    here.unwinding = True
    try:
        try:
            return command()
        finally:
            here.unwinding = False
    except BaseException:
        if not here.asked:
            raise
    finally:
        if here.asked:
            here.end_now(here.asked)
    raise AssertionError


def said(number: int = signal.SIGINT) -> int:
    """Say what ends the program, once; returns the exit status for it."""
    if _listener is None:
        _say(number)
    else:
        with _listener.ending:
            if not _listener.told:
                _say(number)
            _listener.told = True
    return 128 + number


def hand_over(end: Callable[[int], Any]) -> None:
    """Have ``end(number)``, which must not return, end the program where it is to end on the spot, unless it is for a
    second signal. From here on SIGTERM is heard too, and raises SystemExit.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        _listen_to(signal.SIGINT)
    _listen_to(signal.SIGTERM)
    if _listener is not None:
        _listener.end = end


def take_back() -> None:
    """This process is alone again."""
    if _listener is not None:
        _listener.end = _listener.end_now


def _listen_to(number: int, unwinding: bool = True) -> None:
    global _listener
    if threading.current_thread() is not threading.main_thread():
        return
    first = _listener is None
    here = _listener = _listener or _Listener(unwinding)
    signal.signal(number, here.handle)
    if first:
        here.start()


class _Listener:
    """
    Attributes:
      asked: the signal that came, or 0.
      unwinding: whether something may be open, so that the main thread gets an exception first.
      told: whether the line was printed.
      ending: held by the thread that ends the program.
      end: ends the program.
    """

    def __init__(self, unwinding: bool):
        self.asked, self.unwinding, self.told = 0, unwinding, False
        self.ending = threading.RLock()
        self.end: Callable[[int], Any] = self.end_now
        self._taken = False
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        # Python writes the number of each signal there at once, whatever the main thread is doing.
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._lost
        # The last thing at the exit: what is left of it takes no time, and would be killed without a word.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)

    def start(self) -> None:
        threading.Thread(target=self._listen, name="nemotron-jax-signals", daemon=True).start()

    def handle(self, number: int, frame) -> None:
        """In the main thread, as soon as it runs Python."""
        again, self._taken, self.asked = self._taken, True, number
        if again:
            self.end_now(number)
        if not self.unwinding:
            self.end(number)
        with contextlib.suppress(OSError):
            os.write(self._writing, b"\0")  # a library with an event loop may have taken the wakeup descriptor
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def _listen(self) -> None:
        signals, limit = 0, None
        while True:
            if not select.select([self._reading], [], [], limit and max(0.0, limit - time.monotonic()))[0]:
                self.end(self.asked)
            for number in os.read(self._reading, 64):
                if number in LINES:
                    signals += 1
                    self.asked = self.asked or number
            if signals > 1:
                self.end_now(self.asked)
            if self.asked and limit is None:
                if not self.unwinding:
                    self.end(self.asked)
                limit = time.monotonic() + GRACE

    def _lost(self, unraisable) -> None:
        """An exception that nobody can catch."""
        if not self.asked:
            self._unraisable(unraisable)
        elif issubclass(unraisable.exc_type, KeyboardInterrupt | SystemExit):
            self.end(self.asked)

    def end_now(self, number: int) -> None:
        self.ending.acquire()
        said(number)
        # Another thread may hold stdout, and whoever reads it may have stopped: no waiting for that. (A Thread of
        # threading would need a lock that the main thread may hold.)
        flushed = threading.Lock()
        flushed.acquire()
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(_flush, (flushed,))
            flushed.acquire(timeout=0.5)
        os._exit(128 + number)


def _say(number: int) -> None:
    with contextlib.suppress(OSError):
        os.write(2, LINES[signal.Signals(number)].encode())


def _flush(done: threading.Lock) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    done.release()

"""What the check programs share: arguments, a clock, rows that are printed and kept, checks and how they ended."""

import argparse
import faulthandler
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from tests.gpu.loops import checked, shown


class Program:
    """One run: half of its time is for checks, whatever they take, and the rest for timings. All of it is for checks
    where a part of them is asked for: runs of all parts are all checks.

    Attributes:
      small: little cases, anywhere.
      failed: what is not timed any more.
    """

    def __init__(self, doc: str | None, *, little: bool = True):
        """Args: ``little``: it has small cases too, that run anywhere."""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--seconds", type=float, default=120, help="no new case is begun behind them")
        parser.add_argument("--out", help="a JSON file, written after each row")
        parser.add_argument("--part", type=_part, metavar="I/N", help="every N-th check from the I-th on, and no times")
        if little:
            parser.add_argument("--small", action="store_true", help="little cases, anywhere")
        parser.set_defaults(small=False)
        args = parser.parse_args()
        self._part, self._ran, self._all = args.part, 0, 0
        faulthandler.dump_traceback_later(args.seconds + 60, exit=True)
        self.small, self.failed = args.small, set[str]()
        self._begin, self._seconds, self._out, self._rows = time.monotonic(), args.seconds, args.out, []
        self._head = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "small": args.small}

    def late(self, share: float) -> bool:
        """Whether this share of the time is gone, or all of it is for checks."""
        return self._part is not None or time.monotonic() - self._begin > share * self._seconds

    def say(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        print(f"{time.monotonic() - self._begin:6.1f}s {row}", flush=True)
        if self._out:
            with open(self._out, "w") as f:
                json.dump(self._head | {"failed": sorted(self.failed), "rows": self._rows}, f, indent=1)

    def tried(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What a call gives, or its failure as it is printed: then ``name`` has failed."""
        try:
            return call(*arguments, **options)
        except Exception as error:  # every case is tried
            self.failed.add(name)
            return shown(error)

    def check(self, todo: Sequence[tuple[str, dict[str, Any], str, Callable[[], Any]]]) -> None:
        """Run checks, each with the name that fails with it, its row, and the key of its result there."""
        first, step = self._part or (1, 1)
        todo, left_out = todo[first - 1 :: step], Counter[str]()
        self._all += len(todo)
        time_for_checks = self._seconds / (1 if self._part else 2)
        for number, found in checked([call for *_, call in todo], self._begin + time_for_checks):
            name, row, key, _ = todo[number]
            if isinstance(found, Exception):
                self.failed.add(name)
            if found is None:
                left_out[name] += 1
            else:
                self._ran += 1
                self.say(row | {key: shown(found)})
        if left_out:
            self.say({"left out": {f"checks of {name}": count for name, count in left_out.items()}})

    def end(self) -> NoReturn:
        right = "all right" if self._ran == self._all else "none of those that ran failed"
        print(
            f"FAILED: {'; '.join(sorted(self.failed))};" if self.failed else f"{right},",
            f"{self._ran} of {self._all} checks ran,", self._head["device"], "jax", self._head["jax"],
        )  # fmt: skip
        raise SystemExit(bool(self.failed))


def _part(text: str) -> tuple[int, int]:
    """(I, N) of I/N."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"found {text!r}, accepted I/N with I from 1 to N, such as 1/2")
    return int(number), int(of)

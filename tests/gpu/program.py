"""What the check programs share: arguments, a clock, checks, times and their table, a line that says how it ended."""

import argparse
import faulthandler
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax

from tests.gpu.loops import checked, shown

LOOP_ALONE = "loop alone"  # the form of what an iteration takes without a call: later ones are also given without it
Row = dict[str, Any]  # what is checked or timed, with its "kernel", "shape" and "form", and then what was found


class Program:
    """One run: half of its time is for checks, whatever they take, and the rest for times, unless only one of both was
    asked for. A form that failed a check at a shape is not timed there.

    Attributes:
      small: little cases, anywhere.
    """

    def __init__(self, doc: str | None, lacks: Sequence[str] = ()):
        """Args: ``lacks``: "small" or "times", what it has no cases for."""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--seconds", type=float, default=120, help="no new case is begun behind them")
        parser.add_argument("--out", help="a JSON file, written after each row")
        parser.add_argument("--small", action="store_true", help="little cases, anywhere")
        only = parser.add_mutually_exclusive_group()
        only.add_argument("--part", type=_part, metavar="I/N", help="every N-th check from the I-th on, and no times")
        only.add_argument("--times", action="store_true", help="times alone, no checks")
        args = parser.parse_args()
        for flag in lacks:
            if getattr(args, flag):
                parser.error(f"argument --{flag}: found it, but this program has no such cases")
        faulthandler.dump_traceback_later(args.seconds + 60, exit=True)
        self.small, self._part, self._times = args.small, args.part, args.times
        self._begin, self._seconds, self._out = time.monotonic(), args.seconds, args.out
        self._failed, self._found, self._rows = set[str](), list[float](), list[Row]()
        self._result = "error"
        self._ran = {"checks": 0, "times": 0}
        self._left = {"checks": Counter[str](), "times": Counter[str]()}  # by kernel
        self._head = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "small": args.small}

    def check(self, todo: Iterable[tuple[Row, Callable[[], Any]]], result: str = "error") -> None:
        """Run checks, each with its row; the numbers that they give are kept there as ``result``."""
        if self._times:
            return
        self._result = result
        first, step = self._part or (1, 1)
        todo, share = list(todo)[first - 1 :: step], 1 if self._part else 0.5
        for number, found in checked([call for _, call in todo], self._begin + share * self._seconds):
            row, _ = todo[number]
            if found is None:
                self._left["checks"][row["kernel"]] += 1
                continue
            self._ran["checks"] += 1
            if isinstance(found, Exception):
                self._failed.add(_name(row))
            else:
                self._found += jax.tree.leaves(found)
            self._say(row | {result: shown(found)})

    def time(self, todo: Iterable[tuple[Row, dict[str, Callable[[], float]], Callable[[float], Row]]]) -> None:
        """Time forms one after the other, and print the table of them.

        Args:
          todo: rows without a form; for each form a call that gives microseconds; what these mean: rates and floors.
        """
        if self._part:
            return
        table = []
        for case, forms, meaning in todo:
            us = dict[str, float]()
            for form, call in forms.items():
                row = case | {"form": form, "us": "failed"}
                if time.monotonic() > self._begin + self._seconds:
                    self._left["times"][row["kernel"]] += 1
                    continue
                if _name(row) not in self._failed:
                    row |= self._timed(row, call, us, meaning)
                table.append(row)
                self._say(row)
        columns = dict.fromkeys(key for row in table for key in row)
        print("\n" + "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]))
        for row in table:
            print("| " + " | ".join(str(row.get(column, "")) for column in columns) + " |")

    def _timed(self, row: Row, call: Callable[[], float], us: dict[str, float], meaning: Callable[[float], Row]) -> Row:
        """What stands in a row of the table; ``us`` has the times of the forms before, and gets this one."""
        self._ran["times"] += 1
        try:
            found = us[row["form"]] = call()
            numbers = {"us": found}
            if row["form"] != LOOP_ALONE:
                numbers |= {"kernel_us": found - us[LOOP_ALONE]} if LOOP_ALONE in us else {}
                numbers |= meaning(found)
            return {key: float(f"{number:.5g}") for key, number in numbers.items()}
        except Exception as error:  # the other forms are still timed
            self._failed.add(f"time of {_name(row)}")
            return {"us": shown(error)}

    def end(self) -> NoReturn:
        """Say how it ended, with the status 1 if something failed."""
        left = {what: kernels.total() for what, kernels in self._left.items()}
        if any(left.values()):
            self._say({"no time left": {what: dict(kernels) for what, kernels in self._left.items()}})
        if not any(self._ran.values()):
            right = "nothing ran"
        else:
            right = "none that ran failed" if any(left.values()) else "all right"
        found = [
            f"{self._ran['checks']} checks and {self._ran['times']} times ran",
            f"{left['checks']} checks and {left['times']} times not run for lack of time",
            *([f"largest {self._result} {max(self._found):.1e}"] if self._found else []),
            f"{self._head['device']}, jax {self._head['jax']}",
        ]
        line = f"{'FAILED: ' + '; '.join(sorted(self._failed)) if self._failed else right}: {', '.join(found)}"
        print(line)
        self._write(key=line)
        raise SystemExit(bool(self._failed))

    def _say(self, row: Row) -> None:
        self._rows.append(row)
        print(f"{time.monotonic() - self._begin:6.1f}s {row}", flush=True)
        self._write()

    def _write(self, **more: str) -> None:
        if self._out:
            with open(self._out, "w") as f:
                json.dump(self._head | more | {"failed": sorted(self._failed), "rows": self._rows}, f, indent=1)


def _name(row: Row) -> str:
    return f"{row['form']} of {row['kernel']} {row['shape']}"


def _part(text: str) -> tuple[int, int]:
    """(I, N) of I/N."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"found {text}, accepted I/N with 1 <= I <= N, such as 1/2")
    return int(number), int(of)

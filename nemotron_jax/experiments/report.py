"""Results as a Markdown table and as plots."""

import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger("nemotron_jax")

Entry = dict[str, Any]


def table(entries: Sequence[Entry]) -> str:
    """One line a run. Times of virtual CPU devices stand in brackets: they mean nothing."""
    head = (
        "| model | dtype | mesh | plan | rules | what | batch x tokens | status | ms | predicted ms | off | of floor | "
        "all-reduce | all-gather | kernels | exchanged KB | weights GB | cache GB | temp MB | compile s |"
    )
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for e in entries:
        lines.append("| " + " | ".join(_cells(e)) + " |")
    notes = [f"* {title(e)}: {e['status']}: {e['reason']}" for e in entries if e.get("reason")]
    for e in entries:
        if e.get("keeps_promise") is False:
            notes.append(f"* {title(e)}: the plan promises {e['promised']}, the program has {e['collectives']}")
    if any(e.get("times_mean_something") is False for e in entries):
        notes.append("* Times in brackets were taken on CPU devices and mean nothing; counts and bytes do.")
    off = errors(entries)
    if off:
        notes.append(
            f"* Prediction against measurement, {len(off)} runs: median {statistics.median(off):+.0%}, "
            f"from {min(off):+.0%} to {max(off):+.0%}."
        )
    return "\n".join([*lines, "", *notes]) + "\n"


def errors(entries: Sequence[Entry]) -> list[float]:
    """(predicted - measured) / measured of the runs that were measured on GPUs."""
    return [
        e["predicted"]["ms"] / e["ms"] - 1
        for e in entries
        if e.get("ms") and e.get("times_mean_something") and "predicted" in e
    ]


def title(e: Entry) -> str:
    rules = ", ".join(f"{k} {v}" for k, v in e["rules"].items())
    mesh = f"data {e['data']} x tensor {e['tensor']}"
    what = f"{e['what']} {e['batch']} x {e['tokens']}"
    return f"{e['model']}, {e['dtype']}, {mesh}, {e['plan']}, {what}" + (f", {rules}" if rules else "")


def _cells(e: Entry) -> list[str]:
    def number(value: float | None, digits: int = 3) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    collectives, memory = e.get("collectives") or {}, e.get("memory") or {}
    ms = number(e.get("ms"))
    measured = e.get("times_mean_something")
    off = errors([e])
    return [
        e["model"],
        e["dtype"],
        f"{e['data']} x {e['tensor']}",
        f"`{e['plan']}`",
        ", ".join(f"{k}={v}" for k, v in e["rules"].items()),
        e["what"],
        f"{e['batch']} x {e['tokens']}",
        e["status"],
        f"({ms})" if ms and not measured else ms,
        number((e.get("predicted") or {}).get("ms")),
        f"{off[0]:+.0%}" if off else "",
        f"{e['share_of_floor']:.0%}" if e.get("share_of_floor") else "",
        str(collectives.get("all-reduce", 0)) if "collectives" in e else "",
        str(collectives.get("all-gather", 0)) if "collectives" in e else "",
        str(sum((e.get("kernels") or {}).values())) if "collectives" in e else "",
        number(sum(e["collective_bytes"].values()) / 1e3, 1) if "collectives" in e else "",
        number(e["weight_bytes"] / 1e9) if "weight_bytes" in e else "",
        number(sum(e["cache_bytes"].values()) / 1e9) if "weight_bytes" in e else "",
        number(memory["temp"] / 1e6, 1) if memory else "",
        number(e.get("compile_seconds"), 1),
    ]


def plots(entries: Sequence[Entry], folder: str | Path) -> list[Path]:
    """Write the plots that these results give; an empty list, and a line in the log, where matplotlib is missing.

    ``time.png``: time against the tensor-parallel degree; ``fused.png``: speed of each plan over the unfused one;
    ``roofline.png``: share of the floor; ``memory.png``: bytes on each device. Where nothing was measured, predictions
    are drawn, and the title says so.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("no plots: they need matplotlib (pip install 'nemotron-jax[plot]')")
        return []
    folder, written = Path(folder), []
    usable = [e for e in entries if e["status"] == "done"]
    measured = any(e.get("ms") and e.get("times_mean_something") for e in usable)

    def value(e: Entry) -> float | None:
        return e.get("ms") if measured else e["predicted"]["ms"]

    source = "measured" if measured else "predicted for H200, not measured"

    def figure():
        fig = Figure(figsize=(7, 4.2), layout="constrained")
        return fig, fig.subplots()

    def save(fig: Any, name: str) -> None:
        fig.savefig(folder / name, dpi=150, format="png")
        written.append(folder / name)

    lines = _lines(usable, value)
    if lines:
        fig, axes = figure()
        for label, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=label, markersize=4)
        degrees = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(degrees, [str(d) for d in degrees])
        axes.set_yscale("log")
        axes.set_xlabel("tensor-parallel degree")
        axes.set_ylabel("ms per step")
        axes.set_title(source)
        axes.legend(fontsize=6)
        save(fig, "time.png")
    gains = _gains(usable, value)
    if gains:
        fig, axes = figure()
        axes.barh([label for label, _ in gains], [gain for _, gain in gains])
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.tick_params(labelsize=6)
        axes.set_xlabel("times as fast as plan none")
        axes.set_title(source)
        save(fig, "fused.png")
    shares = [
        (_label(e), e["share_of_floor"]) for e in usable if e.get("share_of_floor") and e.get("times_mean_something")
    ]
    if shares:
        fig, axes = figure()
        axes.barh([label for label, _ in shares], [100 * share for _, share in shares])
        axes.tick_params(labelsize=6)
        axes.set_xlabel("% of what memory (decode) or matrix products (prefill) allow")
        save(fig, "roofline.png")
    if usable:
        fig, axes = figure()
        labels = list(dict.fromkeys(_label(e, plan=False) for e in usable))
        by_label = {_label(e, plan=False): e for e in usable}
        left = [0.0] * len(labels)
        parts = {
            "weights": lambda e: e["weight_bytes"],
            "cache": lambda e: sum(e["cache_bytes"].values()),
            "temporaries": lambda e: (e.get("memory") or {}).get("temp", 0),
        }
        for part, size in parts.items():
            sizes = [size(by_label[label]) / 1e9 for label in labels]
            axes.barh(labels, sizes, left=left, label=part)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        axes.tick_params(labelsize=6)
        axes.set_xlabel("GB on each device")
        axes.legend(fontsize=7)
        save(fig, "memory.png")
    return written


def _label(e: Entry, plan: bool = True, mesh: bool = True) -> str:
    parts = [
        e["model"],
        e["what"],
        f"{e['batch']}x{e['tokens']}",
        f"{e['data']}x{e['tensor']}" if mesh else f"data {e['data']}",
    ]
    parts += [f"{k}={v}" for k, v in e["rules"].items()]
    return " ".join([*parts, e["plan"]] if plan else parts)


def _lines(entries: Sequence[Entry], value: Any) -> dict[str, list[tuple[int, float]]]:
    lines: dict[str, list[tuple[int, float]]] = {}
    for e in entries:
        if value(e):
            lines.setdefault(_label(e, mesh=False), []).append((e["tensor"], value(e)))
    return lines


def _gains(entries: Sequence[Entry], value: Any) -> list[tuple[str, float]]:
    """How many times as fast as the unfused plan of the same settings each plan is, on more than one rank."""
    unfused = {_label(e, plan=False): value(e) for e in entries if e["plan"] == "none"}
    gains = []
    for e in entries:
        base = unfused.get(_label(e, plan=False))
        if base and value(e) and e["tensor"] > 1 and e["plan"] != "none":
            gains.append((_label(e), base / value(e)))
    return gains

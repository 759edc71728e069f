"""A comparison as text, and as a picture."""

from pathlib import Path

from nemotron_jax.parity.comparison import Comparison, LayerRow


def text(comparison: Comparison) -> str:
    """The per-layer table, the arrays, the tokens and the verdict, as lines."""
    c = comparison
    lines = [f"reference {c.source}, variant {c.variant}"]
    run = {k: c.run[k] for k in ("dtype", "mesh", "fusion", "plan", "device") if k in c.run}
    lines += ["ours " + ", ".join(f"{k} {_words(v)}" for k, v in run.items())] if run else []
    if c.layers:
        lines += [
            "",
            f"{'layer':>5}  {'kind':<10}  {'relative rms':>12}  {'max':>9}  {'cosine':>11}  {'mixer max':>9}  states",
        ]
        lines += [_row(row, c) for row in c.layers]
    lines += [
        "",
        f"{'array':<18}  {'relative rms':>12}  {'max':>9}  {'KL mean':>9}  {'KL max':>9}  {'top-1':>7}  {'top-5':>7}",
    ]
    for name, d in c.arrays.items():
        line = f"{name:<18}  {d.relative_rms:>12.3e}  {d.max_abs:>9.2e}"
        if name in c.distributions:
            p = c.distributions[name]
            line += f"  {p.kl_mean:>9.2e}  {p.kl_max:>9.2e}  {p.top1:>7.2%}  {p.top5:>7.2%}"
        lines.append(line)
    lines.append("")
    if c.greedy.total:
        lines.append(f"greedy tokens: {c.greedy.matches} of {c.greedy.total} ({c.greedy.ties} stored ties)")
        for name, positions in c.greedy.divergence.items():
            lines += [f"  {name} row {i}: another token at {p}" for i, p in enumerate(positions) if p is not None]
    if c.experts is not None:
        lines.append(f"chosen experts: {c.experts.agreement:.4%} of {c.experts.tokens} the same")
        lines += [f"  block {b}, token {t}: score gap {gap:.3g}" for b, t, gap in c.experts.flips[:20]]
        lines += [f"  and {len(c.experts.flips) - 20} more"] if len(c.experts.flips) > 20 else []
    if c.heldout is not None:
        lines.append(f"held-out loss: {c.heldout[0]:.6f} nats per token, the reference's {c.heldout[1]:.6f}")
    if c.narrow is not None:
        theirs = ", ".join(f"{name} {value:.4g}" for name, value in c.narrow.pytorch.items())
        lines.append(
            f"relative rms error against float64: {c.narrow.ours:.4g}; PyTorch's {theirs}; limit {c.narrow.limit:.4g}"
        )
    if c.skipped:
        lines.append("not in the reference, or not in ours: " + ", ".join(c.skipped))
    if c.unknown:
        lines.append("in the file, but not read here: " + ", ".join(c.unknown))
    if c.first_layer_beyond_tolerance is not None:
        row = next(row for row in c.layers if row.layer == c.first_layer_beyond_tolerance)
        lines.append(f"first layer beyond tolerance: {row.layer} ({row.kind})")
    verdict = {True: "within tolerance", False: "NOT within tolerance", None: "no tolerance applies"}[
        c.within_tolerance
    ]
    lines += [verdict + (f" ({c.tolerance:g})" if c.tolerance is not None else "")] + [f"  {p}" for p in c.problems]
    return "\n".join(lines)


def _words(value: object) -> str:
    return "x".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _row(row: LayerRow, c: Comparison) -> str:
    cells = f"{row.layer:>5}  {row.kind:<10}"
    s = row.stream
    cells += (
        f"  {s.relative_rms:>12.3e}  {s.max_abs:>9.2e}  {s.cosine:>11.8f}" if s else f"  {'':>12}  {'':>9}  {'':>11}"
    )
    cells += f"  {row.mixer.max_abs:>9.2e}" if row.mixer else f"  {'':>9}"
    cells += "  " + ", ".join(f"{name} {d.max_abs:.1e}" for name, d in row.states.items())
    return cells.rstrip() + ("  <- first beyond tolerance" if row.layer == c.first_layer_beyond_tolerance else "")


def plot(comparison: Comparison, path: str | Path) -> None:
    """Relative rms error and largest difference behind each layer, as a PNG.

    Raises:
      ValueError: matplotlib is missing, or the reference has no layers to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a plot needs matplotlib: pip install 'nemotron-jax[plot]'") from error
    rows = [row for row in comparison.layers if row.stream is not None]
    if not rows:
        raise ValueError(f"{comparison.source} has no layer outputs (embed, layer, final): there is nothing to plot")
    figure = Figure(figsize=(max(6.0, 0.18 * len(rows)), 4), layout="constrained")
    axes = figure.subplots()
    floor = 1e-12  # a logarithmic axis has no zero
    x = [row.layer for row in rows]
    streams = [row.stream for row in rows if row.stream is not None]
    axes.semilogy(x, [max(d.relative_rms, floor) for d in streams], "o-", label="relative rms", markersize=4)
    axes.semilogy(x, [max(d.max_abs, floor) for d in streams], "s--", label="largest difference", markersize=4)
    if comparison.tolerance is not None:
        axes.axhline(comparison.tolerance, color="black", linewidth=0.8, linestyle=":", label="tolerance")
    letters = {"embedding": "emb", "final norm": "norm"}
    axes.set_xticks(
        x,
        [f"{row.layer}\n{letters.get(row.kind, row.kind)}" for row in rows],
        fontsize=6,
        rotation=90 if len(rows) > 20 else 0,
    )
    axes.set_xlabel("layer")
    axes.set_title(f"{comparison.source}, variant {comparison.variant}", fontsize=8)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150, format="png")

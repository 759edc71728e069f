"""What would run, from shapes alone: sizes on each device, what happens at each boundary, what is exchanged."""

import logging
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from nemotron_jax.collectives import count_compiled, count_lowered, promised
from nemotron_jax.config import NemotronHConfig
from nemotron_jax.experiments.predict import as_dict, predict
from nemotron_jax.presets import find_preset
from nemotron_jax.runtime import NemotronH
from nemotron_jax.shapes import active_parameter_count, parameter_count
from nemotron_jax.sharding import DATA, TENSOR, ShardingRules, axis_size
from nemotron_jax.step import lower_step, plan_for
from nemotron_jax.targets import H200, Device, Target, here
from nemotron_jax.weights.loading import default_model

logger = logging.getLogger("nemotron_jax")

SHIPPED = "tiny-nemotron-h"  # what the model that the package ships is called, here and in experiments
USABLE = 0.9  # share of a device's memory that weights and cache may take; the rest is for activations and the runtime


def read_config(model: str | None) -> tuple[str, NemotronHConfig]:
    """(name, config) of a folder, a preset, a preset's hub id, or of the shipped model (None).

    Raises:
      ValueError: for a name that is none of these.
    """
    if model in (None, SHIPPED):
        return SHIPPED, NemotronHConfig.from_json(default_model())
    if Path(model).exists():
        return str(model), NemotronHConfig.from_json(Path(model))
    preset = find_preset(model)
    return preset.name, NemotronHConfig.from_dict(preset.config)


def cache_bytes(model: NemotronH, batch: int, capacity: int) -> dict[str, int]:
    """Bytes of the cache on one device, by kind of state."""
    shapes = model.cache_shapes(batch, capacity)
    whole = shapes.bytes_by_kind()
    data = axis_size(model.mesh, DATA)
    cut = {"kv": model.rules.kv_heads, "conv": model.rules.mamba_heads, "ssm": model.rules.mamba_heads}
    return {kind: size // data // (model.axis.size if cut[kind] else 1) for kind, size in whole.items()}


def fits(weights: int, cache: int, device: Device) -> bool:
    """Whether both find room on one device."""
    return weights + cache <= USABLE * device.memory


def degrees(
    config: NemotronHConfig,
    device: Device = H200,
    *,
    batch: int = 1,
    capacity: int = 2049,
    rules: ShardingRules | None = None,
    dtype: Any = None,
) -> list[dict[str, Any]]:
    """For each tensor-parallel degree from 1 to 8 what each device holds and whether it has room, or why it is refused.

    No device is needed.
    """
    rows = []
    for tp in range(1, 9):
        try:
            mesh = AbstractMesh((1, tp), (DATA, TENSOR))
            model = NemotronH(config, mesh=mesh, rules=rules, dtype=dtype, fusion="none")
        except ValueError as error:
            rows.append({"tensor_parallel": tp, "refused": str(error)})
            continue
        weights, cache = model.bytes_per_device(), sum(cache_bytes(model, batch, capacity).values())
        row = {"tensor_parallel": tp, "weight_bytes": weights, "cache_bytes": cache}
        rows.append(row | {"device": device.kind, "fits": fits(weights, cache, device)})
    return rows


def inspect(
    model: NemotronH,
    *,
    batch: int = 1,
    tokens: int = 1,
    context: int = 2048,
    target: Target | None = None,
    compile: bool = False,
) -> dict[str, Any]:
    """Describe one greedy step of ``batch`` rows of ``tokens`` new tokens behind ``context`` tokens.

    Args:
      model: weights are not needed.
      context: tokens that a row's cache holds besides the new ones.
      target: where it would run; default the devices that are here.
      compile: count in the optimised program, and report its memory; otherwise in the program before compilation.

    Returns:
      What ``nemotron-jax inspect --json`` prints, without the table of degrees.

    Raises:
      ValueError: ``compile`` for devices that nothing here can compile for.
    """
    target = target or here()
    if compile and target.how == "lower":
        raise ValueError(
            f"--compile for {target.name} needs a CUDA plugin: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt "
            "(of this jax's version) nvidia-cuda-nvcc nvidia-nvvm; without it programs are lowered only"
        )
    plan = plan_for(model, batch, tokens, target)
    capacity = context + tokens
    lowered = lower_step(model, batch, tokens, capacity, target)
    counts, memory = count_lowered(lowered), None
    if compile:
        compiled = lowered.compile()
        counts, memory = count_compiled(compiled), memory_bytes(compiled)
    cache = cache_bytes(model, batch, capacity)
    prediction = predict(model, plan, batch, tokens, context)
    config = model.config
    return {
        "parameters": parameter_count(config),
        "parameters_without_mtp": parameter_count(config, mtp=False),
        "active_parameters": active_parameter_count(config),
        "pattern": config.hybrid_override_pattern,
        "dtype": str(model.dtype),
        "tensor_parallel": model.axis.size,
        "data_parallel": axis_size(model.mesh, DATA),
        "fusion": model.fusion,
        "plan": plan.letters,
        "fused_boundaries": plan.fused_boundaries,
        "batch": batch,
        "tokens": tokens,
        "context": context,
        "bytes_per_device": model.bytes_per_device(),
        "cache_bytes_per_device": cache,
        "boundaries": [
            {
                "layer": b.layer,
                "kind": b.kind,
                "defers": b.defers,
                "implementation": b.implementation,
                "reason": b.reason,
            }
            for b in plan.boundaries
        ],
        "collectives": counts.collectives,
        "promised": promised(model, plan),
        "collective_bytes": counts.bytes,
        "kernels": counts.kernels,
        "counted_in": counts.source,
        "memory": memory,
        "predicted_on_h200": as_dict(prediction),
        "target": {
            "name": target.name,
            "platform": target.platform,
            "device_kind": target.device_kind,
            "how": target.how,
        },
    }


def memory_bytes(compiled: jax.stages.Compiled) -> dict[str, int] | None:
    """Bytes on one device that a compiled program needs; None where the backend does not say."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    names = ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes")
    return {name.removesuffix("_size_in_bytes"): int(getattr(stats, name)) for name in names}


def as_text(report: dict[str, Any], table: list[dict[str, Any]]) -> str:
    """The report as lines; equal boundaries that follow each other share one."""
    r = report
    lines = [
        f"{r['model']}: {r['parameters']:,} parameters ({r['active_parameters']:,} met by a token), {r['dtype']}",
        f"pattern {r['pattern']}",
        f"step: batch {r['batch']}, {r['tokens']} new behind {r['context']} tokens; data {r['data_parallel']} x tensor "
        f"{r['tensor_parallel']} on {r['target']['device_kind']}",
        f"weights {r['bytes_per_device'] / 1e9:.3f} GB on each device, cache "
        + ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in r["cache_bytes_per_device"].items()),
        "",
        f"fusion {r['fusion']!r}: {r['fused_boundaries']} of {len(r['boundaries'])} boundaries deferred, {r['plan']}",
    ]
    groups: dict[tuple[str, str, str], list[int]] = {}
    for b in r["boundaries"]:
        groups.setdefault((b["kind"], b["implementation"], b["reason"]), []).append(b["layer"])
    for (kind, implementation, reason), layers in groups.items():
        lines.append(f"  {kind} {implementation:<9} layers {_ranges(layers)}" + (f": {reason}" if reason else ""))
    lines += ["", f"counted in the {r['counted_in']} program (the plan promises {_counts(r['promised'])}):"]
    lines += [f"  {op} x {n} ({r['collective_bytes'].get(op, 0):,} bytes)" for op, n in r["collectives"].items()] or [
        "  none"
    ]
    lines += [f"  kernel {name} x {n}" for name, n in r["kernels"].items()]
    if r["memory"]:
        lines.append("compiled for one device: " + ", ".join(f"{k} {v / 1e9:.3f} GB" for k, v in r["memory"].items()))
    p = r["predicted_on_h200"]
    lines.append(f"predicted on H200: {p['ms']:.3f} ms (read {p['read_ms']:.3f} | compute {p['compute_ms']:.3f}, small "
                 f"{p['small_ms']:.3f}, exchange {p['exchange_ms']:.3f})")  # fmt: skip
    lines += ["", "tensor parallel    weights GB    cache GB    fits"]
    for row in table:
        if "refused" in row:
            why = row["refused"].partition(": ")[2].partition(". Degrees")[0]
            lines.append(f"{row['tensor_parallel']:>15}    refused: {why}")
        else:
            sizes = f"{row['weight_bytes'] / 1e9:>10.3f}    {row['cache_bytes'] / 1e9:>8.3f}"
            lines.append(
                f"{row['tensor_parallel']:>15}    {sizes}    {'yes' if row['fits'] else 'no'} ({row['device']})"
            )
    return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {op}" for op, n in counts.items()) or "none"


def _ranges(layers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    parts: list[list[int]] = []
    for i in layers:
        if parts and parts[-1][1] == i - 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)

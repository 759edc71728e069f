"""One run of an experiment: a correctness check, what the compiled program holds, and its time."""

import dataclasses
import logging
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nemotron_jax import timing
from nemotron_jax.collectives import count_compiled, count_lowered, promised
from nemotron_jax.config import NemotronHConfig
from nemotron_jax.experiments.predict import as_dict, predict
from nemotron_jax.experiments.spec import Run
from nemotron_jax.fusion import parse_plan
from nemotron_jax.inspection import SHIPPED, cache_bytes, fits, memory_bytes, read_config
from nemotron_jax.presets import PRESETS
from nemotron_jax.runtime import NemotronH
from nemotron_jax.sharding import ShardingRules
from nemotron_jax.step import lower_step, plan_for
from nemotron_jax.targets import H200, Target, absent, here, parse
from nemotron_jax.weights import load

logger = logging.getLogger("nemotron_jax")

DONE, REFUSED, WRONG, FAILED = "done", "refused", "wrong", "failed"
# How far a plan's logits may be from the unfused plan's (relative rms): the same numbers added in another order. Two
# equally valid orders of bfloat16 rounding differ by a few per cent after some fifty layers.
AGREE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.05}


class Refused(ValueError):
    """The run cannot work, whatever is done; the message says why."""


class Executor:
    """Executes runs, and keeps the last model, since neighbouring runs often differ in the plan alone."""

    def __init__(self, profile: Path | None = None) -> None:
        self.profile = profile
        self._built: tuple[Any, NemotronH] | None = None
        self._targets: dict[str, Target] = {}
        self._unfused: tuple[Any, np.ndarray] | None = None

    def __call__(self, run: Run) -> dict[str, Any]:
        """The run's result: ``status`` and what was found out; nothing is raised but what ends the whole experiment."""
        started = time.perf_counter()
        try:
            result = self._execute(run)
        except Refused as error:
            result = {"status": REFUSED, "reason": str(error)}
        except Exception as error:  # one failed run does not lose the others
            logger.debug("%s failed", run.title(), exc_info=True)
            self._built = self._unfused = None
            result = {"status": FAILED, "reason": f"{type(error).__name__}: {error}"[:2000]}
        return result | {"seconds": round(time.perf_counter() - started, 3)}

    def _target(self, run: Run) -> Target:
        if run.devices not in self._targets:
            self._targets[run.devices] = absent(*parse(run.devices)) if run.devices else here()
        return self._targets[run.devices]

    def _model(self, run: Run, target: Target) -> NemotronH:
        """The run's model with its plan: abstract where nothing is run."""
        key = dataclasses.replace(run, plan="", what="", batch=0, tokens=0, steps=(1, 2), repeats=0).key
        if self._built is not None and self._built[0] == key:
            model = self._built[1]
            parse_plan(run.plan, model.config.hybrid_override_pattern)
            model.fusion = run.plan
            return model
        self._built = self._unfused = None  # before the next one takes memory
        try:
            mesh = target.mesh(run.tensor, run.data)
        except ValueError as error:
            raise Refused(str(error)) from error
        rules = ShardingRules.from_dict(dict(run.rules))
        options = {"mesh": mesh, "rules": rules, "dtype": run.dtype, "fusion": run.plan}
        if target.how == "run" and run.model not in PRESETS and not run.layers:
            model = load(None if run.model == SHIPPED else run.model, **options)
        else:
            _, config = read_config(run.model)
            model = NemotronH(
                first_layers(config, run.layers), **options, rngs=run.seed if target.how == "run" else None
            )
        self._built = key, model
        return model

    def _execute(self, run: Run) -> dict[str, Any]:
        target = self._target(run)
        try:
            model = self._model(run, target)
            plan = plan_for(model, run.batch, run.new_tokens, target)
            model.cache_shapes(run.batch, run.context + run.new_tokens)
        except (ValueError, FileNotFoundError) as error:
            raise Refused(str(error)) from error
        capacity = run.context + run.new_tokens
        cache = cache_bytes(model, run.batch, capacity)
        result: dict[str, Any] = {
            "status": DONE,
            "ran_on": {"device_kind": target.device_kind, "platform": target.platform, "how": target.how},
            "versions": {"jax": jax.__version__},
            "letters": plan.letters,
            "fused_boundaries": plan.fused_boundaries,
            "fallbacks": sorted({b.reason for b in plan.boundaries if "cannot run here" in b.reason}),
            "weight_bytes": model.bytes_per_device(),
            "cache_bytes": cache,
            "fits_h200": fits(model.bytes_per_device(), sum(cache.values()), H200),
            "predicted": as_dict(predict(model, plan, run.batch, run.new_tokens, run.context)),
        }
        result |= self._program(run, model, target, capacity)
        result["promised"] = promised(model, plan)
        result["keeps_promise"] = result["collectives"] == result["promised"]
        if target.how == "run":
            result |= self._time(run, model, target)
        return result

    def _program(self, run: Run, model: NemotronH, target: Target, capacity: int) -> dict[str, Any]:
        """What the step's program holds."""
        lowered = lower_step(model, run.batch, run.new_tokens, capacity, target)
        if target.how == "lower":
            counts, extra = count_lowered(lowered), {"memory": None, "compile_seconds": None}
        else:
            begin = time.perf_counter()
            compiled = lowered.compile()
            extra = {"compile_seconds": round(time.perf_counter() - begin, 3), "memory": memory_bytes(compiled)}
            counts = count_compiled(compiled)
            cost = compiled.cost_analysis()
            if isinstance(cost, dict) and "flops" in cost:
                extra |= {"flops": cost["flops"], "bytes_accessed": cost.get("bytes accessed")}
        return {
            "collectives": counts.collectives,
            "collective_bytes": counts.bytes,
            "kernels": counts.kernels,
            "counted_in": counts.source,
            **extra,
        }

    def _time(self, run: Run, model: NemotronH, target: Target) -> dict[str, Any]:
        """Checked against the unfused plan first: a wrong program gets no time."""
        key = dataclasses.replace(run, plan="").key
        if self._unfused is None or self._unfused[0] != key:
            model.fusion = "none"
            self._unfused = key, _measure(model, dataclasses.replace(run, repeats=1))[1]
            model.fusion = run.plan
        measured, logits = _measure(model, run)
        expected = self._unfused[1]
        error = float(np.sqrt(np.mean((logits - expected) ** 2)) / max(float(np.sqrt(np.mean(expected**2))), 1e-30))
        found: dict[str, Any] = {"relative_rms_to_none": error if math.isfinite(error) else None}
        if not error <= AGREE[run.dtype]:
            reason = (
                f"logits differ from the unfused plan's by {error:.3g} (relative rms), accepted {AGREE[run.dtype]:g}"
            )
            return found | {"status": WRONG, "reason": reason}
        found |= {"ms": measured.median * 1e3, "ms_low": measured.low * 1e3, "ms_high": measured.high * 1e3}
        found["times_mean_something"] = target.platform != "cpu"
        if target.device is not None:
            floor = _floor(model, run, target)
            found["share_of_floor"] = floor / measured.median
        if target.platform != "cpu":
            stats = target.devices[0].memory_stats() or {}
            found["peak_bytes"] = stats.get("peak_bytes_in_use")
        if self.profile is not None:
            with profiled(self.profile / run.key):
                _measure(model, dataclasses.replace(run, repeats=1))
        return found


def first_layers(config: NemotronHConfig, layers: int) -> NemotronHConfig:
    """The same model cut after ``layers`` blocks (0: whole)."""
    if not layers or layers >= config.num_hidden_layers:
        return config
    pattern = config.hybrid_override_pattern[:layers]
    blocks = config.block_configs[:layers]
    return dataclasses.replace(config, hybrid_override_pattern=pattern, block_configs=blocks)


def _measure(model: NemotronH, run: Run) -> tuple[timing.Timing, np.ndarray]:
    """Seconds per step or prompt, and the logits of its last tokens."""
    if run.what == "prefill":
        return timing.prefill(model, run.batch, run.tokens, run.repeats)
    return timing.decode(model, run.batch, run.context, run.steps, run.repeats)


def _floor(model: NemotronH, run: Run, target: Target) -> float:
    """Seconds that the device's memory or its products need at least."""
    assert target.device is not None
    if run.what == "decode":
        return timing.decode_bytes(model, run.batch, run.context) / target.device.bandwidth
    return timing.prefill_flops(model, run.batch, run.tokens) / target.device.flops


def profiled(folder: Path):
    """A trace of what runs inside, for TensorBoard or Perfetto. Layers are named by the model's own scopes.

    Times in a trace are not to be quoted: CUDA graphs are off while it is taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return jax.profiler.trace(str(folder))

"""A model on a mesh: parameters, and programs compiled for them.

Parameters are arguments of every program, in one flat tuple, so that nothing is a constant of the program and no module
is flattened per call. A program is one local function under ``jax.shard_map(check_vma=True)`` under ``jax.jit``.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from nemotron_jax import fusion, processes
from nemotron_jax.cache import AttentionCache, Cache, CacheShapes, allocate, cache_shapes
from nemotron_jax.config import NemotronHConfig
from nemotron_jax.layers.linear import Weight
from nemotron_jax.model import HiddenStates, Network, draft, forward, forward_mtp
from nemotron_jax.parameters import Reader, assemble
from nemotron_jax.random_weights import random_weights
from nemotron_jax.sharding import DATA, TENSOR, Axis, Layout, ShardingRules, axis_size, check_degree, make_mesh
from pallas_kernels import selection
from pallas_kernels.allreduce_rms_norm import flags_state_specs, make_flags_state, peers_reachable

if TYPE_CHECKING:
    from nemotron_jax.generation import Generation
    from nemotron_jax.generation.text import Tokenizer

logger = logging.getLogger("nemotron_jax")

MIN_CAPACITY = 64  # slots of a cache that the caller gave no capacity for; it doubles when it is full


@dataclasses.dataclass
class Output:
    """What a call returns.

    Attributes:
      logits: [batch, tokens, vocab] float32 ([batch, 1, vocab] with ``last_only``), sharded over the vocabulary.
      cache: the state behind the new tokens, to be passed to the next call.
      hidden_states: with ``hidden_states=True``.
    """

    logits: Float[Array, "batch tokens vocab"]
    cache: Cache
    hidden_states: HiddenStates | None = None


@dataclasses.dataclass
class Draft:
    """What an MTP step returns.

    Attributes:
      logits: [batch, tokens, vocab] float32, for the token after ``next_ids``.
      hidden: [batch, tokens, hidden], what a further step takes.
      cache: of the step, behind the new tokens.
    """

    logits: Float[Array, "batch tokens vocab"]
    hidden: Float[Array, "batch tokens hidden"]
    cache: Cache


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
    """One runtime parameter: its path in the network, layout over the tensor axis, and dtype."""

    path: tuple[str | int, ...]
    layout: Layout
    dtype: Any

    @property
    def bytes_per_device(self) -> int:
        return int(np.prod(self.layout.local_shape, dtype=np.int64)) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled function of a model's weights, its ``flags`` buffers and more arguments; called with these alone."""

    model: "NemotronH"
    program: Any
    flags: Any

    def __call__(self, *args: Any) -> Any:
        return self.program(self.model._weights(), self.flags, *args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The program before compilation; shapes are enough, for the weights too."""
        weights = self.model.abstract_weights() if self.model.weights is None else self.model.weights
        return self.program.lower(weights, self.flags, *args)


class NemotronH:
    """A Nemotron-H model over a ``data`` x ``tensor`` mesh.

    ``model(ids, cache=...)`` runs new tokens of any number through it; programs are compiled once per shape of (ids,
    cache) and kept.
    """

    def __init__(
        self,
        config: NemotronHConfig,
        *,
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
        dtype: Any = None,
        fusion: str = "auto",
        state_dtype: Any = jnp.float32,
        mtp: bool = False,
        rngs: "nnx.Rngs | int | None" = None,
        reader: Reader | None = None,
        progress: Callable[[int], None] = lambda bytes_read: None,
    ):
        """Describe the model, then fill it from ``reader``, or with random values from ``rngs``, or leave it abstract.

        Args:
          config: any config of the family.
          mesh: axes ``data`` and ``tensor``; default one device.
          rules: which logical axes are cut over ``tensor``.
          dtype: of matrices and activations; default the config's. Norms, convolution, A_log, D, dt_bias, biases and
            router stay float32.
          fusion: fusion plan (see ``fusion.parse_plan``).
          state_dtype: of the SSM state in the cache.
          mtp: also hold the multi-token-prediction layers (:meth:`draft`, :meth:`mtp_logits`).
          rngs: seed of random values.
          reader: where the values come from.
          progress: called with the number of bytes read.

        Raises:
          ValueError: before any memory is used, if the mesh or the plan does not fit the model.
        """
        self.config, self.rules = config, rules or ShardingRules()
        self.mesh = make_mesh() if mesh is None else mesh
        unknown = set(self.mesh.axis_names) - {DATA, TENSOR}
        if unknown:
            raise ValueError(f"mesh axes: found {self.mesh.axis_names}, accepted {DATA!r} and {TENSOR!r}")
        self.axis = Axis(TENSOR, axis_size(self.mesh, TENSOR))
        self.mtp = mtp
        if mtp and not config.num_mtp_layers:
            raise ValueError("mtp: the model has no multi-token-prediction layers (num_nextn_predict_layers = 0)")
        check_degree(config, self.axis.size, self.rules, mtp)
        self.dtype = jnp.dtype(dtype or config.dtype)
        if self.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(f"dtype: found {self.dtype}, accepted float32, bfloat16, float16")
        self.state_dtype = jnp.dtype(state_dtype)
        self.residual_dtype = jnp.dtype(jnp.float32) if config.residual_in_fp32 else self.dtype
        self.fusion = fusion
        self._check_plan()

        network = Network(
            config, axis=self.axis, rules=self.rules, dtype=self.dtype, residual_dtype=self.residual_dtype, mtp=mtp
        )
        self._graphdef, state = nnx.split(network)
        flat = nnx.to_flat_state(state)
        self.parameters = tuple(
            ParameterInfo(tuple(path), variable.get_metadata()["layout"], variable.get_value().dtype)
            for path, variable in flat
        )
        self._paths = tuple(p.path for p in self.parameters)
        self._variables = tuple(variable for _, variable in flat)
        self._weight_specs = tuple(p.layout.spec for p in self.parameters)
        self.weights: tuple[jax.Array, ...] | None = None
        self.origin: Any = None  # what the weights were loaded from, as nemotron_jax.weights keeps it
        self._programs: dict[Any, Callable] = {}
        self._flags_states: dict[Any, Any] = {}
        self.folder: Path | None = (
            None  # of the checkpoint: its tokenizer and generation_config.json are beside the weights
        )
        if reader is not None:
            self.fill(reader, progress)
        elif rngs is not None:
            self.weights = random_weights(self.parameters, self.mesh, _seed(rngs), progress)

    def fill(self, reader: Reader, progress: Callable[[int], None] = lambda bytes_read: None) -> None:
        """Give every parameter its values; each device gets only its rank's rows."""
        self.weights = assemble(self.parameters, self.mesh, reader, progress)

    def __repr__(self) -> str:
        shape = "x".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        return f"NemotronH({self.config.num_hidden_layers} layers, {self.dtype}, mesh {shape}, fusion {self.fusion!r})"

    # ------------------------------------------------------------------------------------------- description
    def network(self, weights: Sequence[jax.Array] | None = None) -> Network:
        """The Flax NNX module over ``weights`` (default: the model's own arrays). Its ``__call__`` belongs under
        ``jax.shard_map``."""
        weights = self._weights() if weights is None else weights
        state = nnx.from_flat_state(
            [
                (path, variable.replace(w))
                for path, variable, w in zip(self._paths, self._variables, weights, strict=True)
            ]
        )
        return nnx.merge(self._graphdef, state)

    def parameter(self, *path: str | int) -> jax.Array:
        """One parameter's global array, by its path in the network, such as ``("layers", 0, "mixer", "in_proj")``."""
        return self._weights()[self._paths.index(path)]

    def replace_weights(self, values: dict[tuple[str | int, ...], jax.Array]) -> None:
        """Put other arrays of the same shape, dtype and sharding in the place of some parameters."""
        weights = list(self._weights())
        for path, value in values.items():
            i = self._paths.index(path)
            if (value.shape, value.dtype) != (weights[i].shape, weights[i].dtype):
                raise ValueError(
                    f"{path}: found {value.dtype}{value.shape}, accepted {weights[i].dtype}{weights[i].shape}"
                )
            weights[i] = jax.device_put(value, weights[i].sharding)
        self.weights = tuple(weights)

    def bytes_per_device(self) -> int:
        """Parameter bytes on each device."""
        return sum(p.bytes_per_device for p in self.parameters)

    def plan(self, batch: int, tokens: int, steps: int = 1) -> "fusion.FusionPlan":
        """What runs at each boundary for ``batch`` rows of ``tokens`` new tokens, in a program that loops over
        ``steps`` of them."""
        return self._resolve(batch, tokens, self.fusion, self.config.hybrid_override_pattern, steps)

    def mtp_plan(self, batch: int, tokens: int) -> "fusion.FusionPlan":
        """The same for an MTP step. A plan of ``layers:`` names the model's own boundaries, so the step defers nothing
        then."""
        spec = "none" if self.fusion.startswith("layers:") else self.fusion
        return self._resolve(batch, tokens, spec, self.config.mtp_hybrid_override_pattern)

    def _resolve(self, batch: int, tokens: int, spec: str, pattern: str, steps: int = 1) -> "fusion.FusionPlan":
        local_tokens = (batch // max(1, axis_size(self.mesh, DATA))) * tokens
        reachable = self.axis.size == 1 or peers_reachable(self.mesh)
        return fusion.plan(
            spec,
            pattern,
            tokens=local_tokens,
            hidden=self.config.hidden_size,
            dtype=self.dtype,
            residual_dtype=self.residual_dtype,
            mesh=self.mesh,
            axis=self.axis,
            rules=self.rules,
            peers_reachable=reachable,
            steps=steps,
        )

    def _check_plan(self) -> None:
        fusion.parse_plan(self.fusion, self.config.hybrid_override_pattern)

    def cache_shapes(self, batch: int, capacity: int) -> CacheShapes:
        """Shapes and specs of a cache for ``batch`` rows of up to ``capacity`` tokens."""
        return self._cache_shapes(self.config.hybrid_override_pattern, batch, capacity)

    def mtp_cache_shapes(self, batch: int, capacity: int) -> CacheShapes:
        """The same for the cache of one MTP step; every step has its own."""
        return self._cache_shapes(self.config.mtp_hybrid_override_pattern, batch, capacity)

    def _cache_shapes(self, pattern: str, batch: int, capacity: int) -> CacheShapes:
        return cache_shapes(
            self.config,
            pattern,
            batch=batch,
            capacity=capacity,
            mesh=self.mesh,
            rules=self.rules,
            dtype=self.dtype,
            state_dtype=self.state_dtype,
        )

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache over the model's mesh."""
        return allocate(self.cache_shapes(batch, capacity), self.mesh)

    def new_mtp_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache of one MTP step."""
        return allocate(self.mtp_cache_shapes(batch, capacity), self.mesh)

    # ------------------------------------------------------------------------------------------- text
    @functools.cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """The checkpoint's tokenizer; None where the model came without one."""
        from nemotron_jax.generation.text import Tokenizer  # generation builds on this module

        if self.folder is None or not (self.folder / "tokenizer.json").is_file():
            return None
        return Tokenizer(self.folder)

    def generate(self, prompts: Any, *, seed: "int | Sequence[int]" = 0, **settings: Any) -> "Generation":
        """Write an answer to each prompt: ``Generator(self, **settings).generate(prompts, seed=seed)``."""
        from nemotron_jax.generation import Generator

        return Generator(self, **settings).generate(prompts, seed=seed)

    # ------------------------------------------------------------------------------------------- programs
    def compile(
        self, local: Callable, in_specs: Sequence[Any], out_specs: Any, *, flags: Any = None, donate: Sequence[int] = ()
    ) -> "Program":
        """``local(network, state, *args)`` as a program over the mesh.

        Args:
          local: runs on each device with local arrays; ``state`` is the flags buffers or None.
          in_specs, out_specs: PartitionSpec trees of args and results.
          flags: buffers of the ``flags`` implementation (:meth:`flags_state`); never donated.
          donate: indices of args whose buffers the program may take.

        Returns:
          A function of args alone; its ``lower(*args)`` gives the program before compilation.
        """

        def entry(weights, state, *args):
            return local(self.network(weights), state, *args)

        flag_specs = None if flags is None else flags_state_specs(flags)
        program = jax.jit(
            jax.shard_map(
                entry,
                mesh=self.mesh,
                in_specs=(self._weight_specs, flag_specs, *in_specs),
                out_specs=out_specs,
                check_vma=True,
            ),
            donate_argnums=tuple(i + 2 for i in donate),
        )

        return Program(self, program, flags)

    def flags_state(self, plan: "fusion.FusionPlan", local_tokens: int) -> Any:
        """Persistent buffers for the boundaries that run ``flags``, shared by all programs of this model; None if there
        are none."""
        if not plan.uses("flags"):
            return None
        size = 1 << max(0, local_tokens - 1).bit_length()
        if size not in self._flags_states:
            self._flags_states[size] = make_flags_state(
                self.mesh, self.axis.name, max_tokens=size, hidden=self.config.hidden_size, dtype=self.dtype
            )
        return self._flags_states[size]

    def abstract_weights(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes, dtypes and shardings of the parameters: enough to lower and compile any program without memory."""
        return tuple(
            jax.ShapeDtypeStruct(p.layout.global_shape, p.dtype, sharding=NamedSharding(self.mesh, p.layout.spec))
            for p in self.parameters
        )

    def _weights(self) -> tuple[jax.Array, ...]:
        if self.weights is None:
            raise ValueError(
                "this model is abstract: load a checkpoint into it, or build it with rngs for random values"
            )
        return self.weights

    @property
    def rows_spec(self) -> str | None:
        """Mesh axis of a batch dimension."""
        return DATA if axis_size(self.mesh, DATA) > 1 else None

    @property
    def vocab_spec(self) -> str | None:
        """Mesh axis of the vocabulary dimension of logits."""
        return TENSOR if self.rules.vocab and self.axis.size > 1 else None

    def forward_program(
        self, batch: int, tokens: int, *, masked: bool, capacity: int, capture: bool = False, last_only: bool = False
    ) -> Callable:
        """The program of one call: ``(ids, mask, cache) -> (logits, cache, hidden states)``."""
        key = ("forward", batch, tokens, masked, capacity, capture, last_only, self.fusion, selection.key())
        if key in self._programs:
            return self._programs[key]
        plan = self.plan(batch, tokens)
        logger.info("%s", plan.describe())
        rows, vocab = self.rows_spec, self.vocab_spec
        specs = self.cache_shapes(batch, capacity).specs
        experts = (P(None, rows),) * 3 if capture and "E" in self.config.hybrid_override_pattern else None
        hidden = HiddenStates(P(rows), P(None, rows), P(rows), P(None, rows), experts) if capture else None

        def local(network, state, ids, mask, cache):
            return forward(network, ids, mask, cache, plan, state=state, capture=capture, last_only=last_only)

        flags = self.flags_state(plan, (batch // max(1, axis_size(self.mesh, DATA))) * tokens)
        program = self.compile(
            local, (P(rows), P(rows) if masked else None, specs), (P(rows, None, vocab), specs, hidden), flags=flags
        )
        self._programs[key] = program
        return program

    def __call__(
        self,
        ids: Int[Array, "batch tokens"],
        cache: Cache | None = None,
        mask: Bool[Array, "batch tokens"] | None = None,
        hidden_states: bool = False,
        last_only: bool = False,
    ) -> Output:
        """Run new tokens through the model.

        Args:
          ids: [batch, tokens] int32 token ids. Zero tokens are allowed.
          cache: the state the rows continue from (None: they start). It is not changed; the returned one holds the new
            tokens too.
          mask: [batch, tokens], nonzero at real tokens; pads may stand on either side. Rows may hold no real token at
            all.
          hidden_states: also return every layer's output.
          last_only: logits of each row's last real token alone.

        Returns:
          Output; logits at pads are finite and mean nothing.

        Raises:
          ValueError: for ids out of the vocabulary (NumPy or Python input), and for shapes that do not fit each other.
        """
        ids, mask = self.check_ids(ids, mask)
        batch, tokens = ids.shape
        cache = self.room(cache, batch, tokens)
        longest = cache.longest
        capacity = cache.capacity or 0
        program = self.forward_program(
            batch, tokens, masked=mask is not None, capacity=capacity, capture=hidden_states, last_only=last_only
        )
        logits, new, hidden = program(ids, mask, dataclasses.replace(cache, longest=None))
        if logits.shape[-1] != self.config.vocab_size:
            logits = logits[..., : self.config.vocab_size]
        new = dataclasses.replace(new, longest=None if longest is None else longest + tokens)
        return Output(logits, new, hidden)

    def draft(
        self,
        hidden: Float[Array, "batch tokens hidden"],
        next_ids: Int[Array, "batch tokens"],
        cache: Cache | None = None,
        mask: Bool[Array, "batch tokens"] | None = None,
        step: int = 0,
    ) -> Draft:
        """Run an MTP step: from the state of each token and the token that follows it, predict the one after that.

        Args:
          hidden: states after the final norm (``HiddenStates.final``), or ``Draft.hidden`` of the step before.
          next_ids: int32 ids.
          cache: of this step, made by :meth:`new_mtp_cache` or returned by an earlier call (None: rows start). Not
            changed.
          mask: nonzero where both are real.
          step: which stored step.

        Raises:
          ValueError: for a model without MTP layers, a step that is not stored, and shapes that do not fit.
        """
        self._check_mtp()
        if not 0 <= step < self.config.num_nextn_predict_layers:
            raise ValueError(f"step: found {step}, accepted 0 to {self.config.num_nextn_predict_layers - 1}")
        next_ids, mask = self.check_ids(next_ids, mask)
        if np.shape(hidden) != (*next_ids.shape, self.config.hidden_size):
            raise ValueError(
                f"hidden: found shape {np.shape(hidden)}, accepted {(*next_ids.shape, self.config.hidden_size)}"
            )
        batch, tokens = next_ids.shape
        if cache is None:
            cache = self.new_mtp_cache(batch, max(MIN_CAPACITY, 1 << max(0, tokens - 1).bit_length()))
        cache = self.room(cache, batch, tokens)
        longest, capacity = cache.longest, cache.capacity or 0
        program = self.draft_program(batch, tokens, masked=mask is not None, capacity=capacity, step=step)
        logits, x, new = program(hidden, next_ids, mask, dataclasses.replace(cache, longest=None))
        new = dataclasses.replace(new, longest=None if longest is None else longest + tokens)
        return Draft(logits[..., : self.config.vocab_size], x, new)

    def draft_program(self, batch: int, tokens: int, *, masked: bool, capacity: int, step: int = 0) -> Callable:
        """The program of :meth:`draft`: ``(hidden, next_ids, mask, cache) -> (logits, hidden, cache)``."""
        key = ("draft", batch, tokens, masked, capacity, step, self.fusion, selection.key())
        if key not in self._programs:
            plan, rows = self.mtp_plan(batch, tokens), self.rows_spec
            specs = self.mtp_cache_shapes(batch, capacity).specs

            def local(network, state, hidden, ids, mask, cache):
                return draft(network, hidden, ids, mask, cache, plan, step=step, state=state)

            flags = self.flags_state(plan, (batch // max(1, axis_size(self.mesh, DATA))) * tokens)
            self._programs[key] = self.compile(
                local, (P(rows), P(rows), P(rows) if masked else None, specs), (P(rows, None, self.vocab_spec), P(rows),
                specs), flags=flags,
            )  # fmt: skip
        return self._programs[key]

    def mtp_logits(
        self, ids: Int[Array, "batch tokens"], mask: Bool[Array, "batch tokens"] | None = None, depth: int = 1
    ) -> Float[Array, "batch predictions vocab"]:
        """What MTP predicts along known tokens: entry t is for token t + 1 + ``depth``, from tokens 0 .. t + depth.

        Args:
          ids: the tokens; nothing is cached.
          mask: nonzero at real tokens; entries whose next ``depth`` tokens are not real mean nothing.
          depth: steps run one after the other; where fewer are stored, the last one runs again.

        Returns:
          [batch, tokens - depth, vocab] float32.
        """
        self._check_mtp()
        ids, mask = self.check_ids(ids, mask)
        batch, tokens = ids.shape
        if not 1 <= depth < tokens:
            raise ValueError(f"depth: found {depth}, accepted 1 to {tokens - 1}, fewer than the {tokens} tokens of ids")
        key = ("mtp", batch, tokens, mask is not None, depth, self.fusion, selection.key())
        if key not in self._programs:
            plan, rows = self.plan(batch, tokens), self.rows_spec
            mtp_plans = [self.mtp_plan(batch, tokens - 1 - d) for d in range(depth)]

            def local(network, state, ids, mask):
                return forward_mtp(network, ids, mask, plan, mtp_plans, state=state)

            local_tokens = (batch // max(1, axis_size(self.mesh, DATA))) * tokens
            states = (self.flags_state(p, local_tokens) for p in (plan, *mtp_plans))
            flags = next((s for s in states if s is not None), None)
            self._programs[key] = self.compile(
                local, (P(rows), None if mask is None else P(rows)), P(rows, None, self.vocab_spec), flags=flags
            )
        return self._programs[key](ids, mask)[..., : self.config.vocab_size]

    def _check_mtp(self) -> None:
        if not self.mtp:
            raise ValueError("this model holds no MTP layers: build or load it with mtp=True")

    def check_ids(self, ids, mask=None) -> tuple[jax.Array, jax.Array | None]:
        """``ids`` and ``mask`` as device arrays of matching shape. Host input is checked against the vocabulary."""
        if not isinstance(ids, jax.Array):
            ids = np.asarray(ids)
            if ids.dtype.kind not in "iu":
                raise ValueError(f"ids: found dtype {ids.dtype}, accepted integers")
            if ids.size and not (0 <= ids.min() and ids.max() < self.config.vocab_size):
                raise ValueError(f"ids: found {ids.min()} to {ids.max()}, accepted 0 to {self.config.vocab_size - 1}")
        if ids.ndim != 2:
            raise ValueError(f"ids: found shape {ids.shape}, accepted [batch, tokens]")
        data = axis_size(self.mesh, DATA)
        if ids.shape[0] % data:
            raise ValueError(f"ids: found batch {ids.shape[0]}, accepted a multiple of the mesh's data axis, {data}")
        if mask is not None:
            if np.shape(mask) != ids.shape:
                raise ValueError(f"mask: found shape {np.shape(mask)}, accepted that of ids, {ids.shape}")
            mask = jnp.asarray(mask) != 0
        return jnp.asarray(ids, jnp.int32), mask

    def room(self, cache: Cache | None, batch: int, tokens: int) -> Cache:
        """``cache`` (or a new one) with room for ``tokens`` more per row; KV buffers double when they are full."""
        if cache is None:
            return self.new_cache(batch, max(MIN_CAPACITY, 1 << max(0, tokens - 1).bit_length()))
        if cache.batch != batch:
            raise ValueError(f"cache: found {cache.batch} rows, accepted {batch}, as many as ids")
        capacity = cache.capacity
        if capacity is None:
            return cache
        longest = cache.longest
        if longest is None:  # built or changed outside: ask the device, once
            longest = int(np.max(processes.host(cache.length), initial=0))
            cache = dataclasses.replace(cache, longest=longest)
        if longest + tokens <= capacity:
            return cache
        return self.grow(cache, max(2 * capacity, 1 << (longest + tokens - 1).bit_length()))

    def grow(self, cache: Cache, capacity: int) -> Cache:
        """The same state with room for ``capacity`` tokens."""

        def longer(layer):
            if not isinstance(layer, AttentionCache):
                return layer
            extra = capacity - layer.k.shape[1]
            k, v = (jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))) for x in (layer.k, layer.v))
            return AttentionCache(jax.device_put(k, layer.k.sharding), jax.device_put(v, layer.v.sharding))

        return dataclasses.replace(cache, layers=tuple(longer(layer) for layer in cache.layers))


def _seed(rngs: "nnx.Rngs | int") -> int:
    if isinstance(rngs, int):
        return rngs
    return int(jax.random.randint(rngs.params(), (), 0, np.iinfo(np.int32).max))


__all__ = ["NemotronH", "Output", "ParameterInfo", "Weight"]

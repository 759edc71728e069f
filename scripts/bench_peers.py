#!/usr/bin/env python3
"""The same shapes through PyTorch: transformers, and mamba_ssm's Triton kernels where they are at hand.

    python scripts/bench_peers.py scan step decode prefill --model 8b --mamba-ssm DIR --out peers.json

scan     many tokens of one Mamba-2 block (mamba_chunk_scan_combined)
step     one token of it (selective_state_update)
decode   a token of the whole model with random weights, batch 1, as one CUDA graph
prefill  2k and 8k tokens of it

DIR is the unpacked source of mamba_ssm from PyPI (`pip download --no-deps --no-binary :all: mamba_ssm`, tar xzf). Its
own __init__ needs the package's CUDA build; its Triton modules do not, so they are put under the package's name alone,
and transformers finds them there. Without DIR what needs them is left out, and says so; the whole model then runs on
transformers' plain PyTorch, which cannot hold 8k tokens of the 8B.

Needs no JAX, and runs in any environment with torch and transformers. Kernels are timed inside a CUDA graph of many
calls on different data, so that what the host needs to launch them is not in it, and checked against plain PyTorch
before. What fails is written down, and the rest goes on.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRESETS = {"8b": "nemotron-h-8b", "9b": "nemotron-nano-9b-v2", "nano3": "nemotron-3-nano-30b-a3b"}
# What of a dry run is left: every kind of block, few of each.
DRY = dict(
    hidden_size=64, intermediate_size=96, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128, n_routed_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
)  # fmt: skip


def find_mamba_ssm(source: Path | None, folder: Path) -> str:
    """Make mamba_ssm's Triton modules importable; returns why they are not, or an empty string.

    Args:
      source: the unpacked sdist.
      folder: where a package of that name is put whose modules are the sdist's and whose __init__ is empty.
    """
    if source is not None:
        package = source / "mamba_ssm"
        if not (package / "ops" / "triton" / "ssd_combined.py").is_file():
            return f"--mamba-ssm: {source} holds no mamba_ssm/ops/triton/ssd_combined.py"
        (folder / "mamba_ssm").mkdir()
        (folder / "mamba_ssm" / "__init__.py").write_text(f"__path__.append({str(package)!r})\n")
        sys.path.insert(0, str(folder))
    try:
        from mamba_ssm.ops.triton import selective_state_update, ssd_combined  # noqa: F401
    except Exception as error:  # an installed one may fail in many ways, a missing Triton among them
        return f"mamba_ssm's Triton modules cannot be imported: {type(error).__name__}: {str(error)[:200]}"
    return ""


class Timer:
    """Seconds of calls on one device."""

    def __init__(self, device: str, repeats: int):
        import torch

        self.torch, self.device, self.repeats = torch, device, repeats

    def wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def plain(self, call, warm: int = 2) -> dict[str, float]:
        """As the host starts it."""
        for _ in range(warm):
            call()
        seconds = []
        for _ in range(self.repeats):
            self.wait()
            begin = time.perf_counter()
            call()
            self.wait()
            seconds.append(time.perf_counter() - begin)
        return {"median": statistics.median(seconds), "low": min(seconds), "high": max(seconds)}

    def graph(self, call, calls: int = 1) -> dict[str, float]:
        """As one CUDA graph that makes ``calls`` calls; seconds of one of them."""
        if self.device != "cuda":
            found = self.plain(call, 1)
            return {key: value / calls for key, value in found.items()}
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        found = self.plain(graph.replay, 3)
        return {key: value / calls for key, value in found.items()}


def check(found, wanted, bound: float = 2e-2) -> float:
    """Relative rms error; raises beyond the bound, and where there is NaN."""
    found, wanted = found.float(), wanted.float()
    error = float(((found - wanted).square().mean() / wanted.square().mean()).sqrt())
    if not error <= bound:
        raise AssertionError(f"relative rms error {error:.2g} against plain PyTorch, accepted {bound:g}")
    return error


# ------------------------------------------------------------------------------------------------- kernels
def scan_inputs(torch, config: dict, tokens: int, device: str):
    heads, p, e, groups = sizes(config)
    half = torch.bfloat16
    x = torch.randn(1, tokens, heads, p, device=device, dtype=half) * 0.5
    dt = torch.randn(1, tokens, heads, device=device, dtype=half)
    a = -torch.rand(heads, device=device) * 4 - 0.5
    b, c = (torch.randn(1, tokens, groups, e, device=device, dtype=half) * 0.5 for _ in range(2))
    return x, dt, a, b, c, torch.ones(heads, device=device), torch.zeros(heads, device=device) - 2


def sizes(config: dict) -> tuple[int, int, int, int]:
    return tuple(config[k] for k in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups"))


def plain_scan(torch, x, dt, a, b, c, d, bias):
    """The recurrence, token by token, in float32: (y, state)."""
    heads = x.shape[2]
    x, dt = x.float(), torch.nn.functional.softplus(dt.float() + bias)
    b, c = (v.float().repeat_interleave(heads // v.shape[2], 2) for v in (b, c))
    state = torch.zeros(*x.shape[:1], *x.shape[2:], b.shape[-1], device=x.device)
    found = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * a)[..., None, None]
        state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
        found.append((state * c[:, t, :, None, :]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(found, 1), state


def bench_scan(torch, timer: Timer, config: dict, small: bool):
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def call(inputs, chunk):
        x, dt, a, b, c, d, bias = inputs
        return mamba_chunk_scan_combined(
            x, dt, a, b, c, chunk, D=d, dt_bias=bias, dt_softplus=True, return_final_states=True
        )

    inputs = scan_inputs(torch, config, 300, timer.device)
    y, state = call(inputs, 128)
    wanted = plain_scan(torch, *inputs)
    errors = check(y, wanted[0]), check(state, wanted[1])
    for tokens in (64,) if small else (2048, 8192, 32768):
        inputs = scan_inputs(torch, config, tokens, timer.device)
        for chunk in (128, 256):
            time = timer.graph(lambda inputs=inputs, chunk=chunk: call(inputs, chunk))
            yield {"what": "scan", "tokens": tokens, "chunk": chunk, "error": errors[0], **milliseconds(time)}


def bench_step(torch, timer: Timer, config: dict, small: bool):
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    heads, p, e, groups = sizes(config)
    for rows in (1, 2) if small else (1, 8, 32, 128):
        # more states than the second-level cache holds
        layers = 2 if small else max(2, -(-(256 << 20) // (rows * heads * p * e * 4)))
        layers = min(layers, 64)
        x, dt, a, b, c, d, bias = (v for v in scan_inputs(torch, config, rows, timer.device))
        x, dt, b, c = (v[0] for v in (x, dt, b, c))
        states = [torch.randn(rows, heads, p, e, device=timer.device) for _ in range(layers)]
        wide = (a[:, None, None].expand(heads, p, e), d[:, None].expand(heads, p), bias[:, None].expand(heads, p))

        def call(state, x=x, dt=dt, b=b, c=c, wide=wide):
            return selective_state_update(
                state, x, dt[..., None].expand(*x.shape), wide[0], b, c, D=wide[1], dt_bias=wide[2], dt_softplus=True
            )

        old = states[0].clone()
        y = call(states[0])
        step = torch.nn.functional.softplus(dt.float() + bias)
        wide_b, wide_c = (v.float().repeat_interleave(heads // groups, 1) for v in (b, c))
        new = old * torch.exp(step * a)[..., None, None] + (step[..., None] * x.float())[..., None] * wide_b[:, :, None]
        errors = check(y, (new * wide_c[:, :, None]).sum(-1) + d[:, None] * x.float()), check(states[0], new)
        time = timer.graph(lambda states=states, call=call: [call(s) for s in states], layers)
        yield {"what": "step", "rows": rows, "error": errors[0], **milliseconds(time)}


def milliseconds(time: dict[str, float]) -> dict[str, float]:
    return {"ms": time["median"] * 1e3, "ms_low": time["low"] * 1e3, "ms_high": time["high"] * 1e3}


# ------------------------------------------------------------------------------------------------- whole models
def build(torch, config: dict, device: str):
    """transformers' model of these shapes with random weights, made on the device."""
    from transformers import AutoModelForCausalLM, NemotronHConfig
    from transformers.initialization import no_init_weights

    dtype = torch.bfloat16
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(NemotronHConfig(**config), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "conv1d" not in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif "A_log" in name:
                parameter.copy_(torch.log(1 + 15 * torch.rand_like(parameter, dtype=torch.float32)))
            elif "norm" in name or name.endswith(".D"):
                parameter.fill_(1)
            else:
                parameter.normal_(0, 0.1)
        for name, buffer in model.named_buffers():
            if "e_score" in name:
                buffer.zero_()
    if "n_routed_experts" in config:
        with contextlib.suppress(Exception):  # the fastest there is, where this version has it
            model.set_experts_implementation("grouped_mm")
    return model.eval()


def bench_prefill(torch, timer: Timer, model, config: dict, lengths):
    vocab = config["vocab_size"]
    for tokens in lengths:
        ids = torch.randint(0, vocab, (1, tokens), device=timer.device)
        with torch.no_grad():
            time = timer.plain(lambda ids=ids: model(ids, use_cache=True, logits_to_keep=1))
        yield {"what": "prefill", "tokens": tokens, **milliseconds(time)}


def bench_decode(torch, timer: Timer, model, config: dict, context: int):
    from transformers import StaticCache

    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=context + 512)
        ids = torch.randint(0, config["vocab_size"], (1, context), device=timer.device)
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        last = torch.zeros((1, 1), dtype=torch.long, device=timer.device)

        def step():
            logits = model(last, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            last.copy_(logits[:, -1:].argmax(-1))

        yield {"what": "decode", "how": "eager", "context": context, **milliseconds(timer.plain(step))}
        if timer.device == "cuda":
            yield {"what": "decode", "how": "CUDA graph", "context": context, **milliseconds(timer.graph(step))}


def shapes(name: str, small: bool) -> dict:
    """Of a preset, as transformers takes them."""
    preset = json.loads((ROOT / "nemotron_jax" / "presets" / f"{PRESETS[name]}.json").read_text())["config"]
    left_out = ("architectures", "model_type", "torch_dtype", "transformers_version", "auto_map")
    config = {key: value for key, value in preset.items() if key not in left_out}
    config["max_position_embeddings"] = max(config["max_position_embeddings"], 16384)
    if small:
        config |= {key: value for key, value in DRY.items() if key in config}
        config["hybrid_override_pattern"] = "ME*E" if "E" in config["hybrid_override_pattern"] else "M-*-"
        config["num_hidden_layers"] = 4
    return config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("scan", "step", "decode", "prefill"))
    parser.add_argument("--model", choices=list(PRESETS), default="8b")
    parser.add_argument("--mamba-ssm", type=Path, metavar="DIR", help="unpacked source of mamba_ssm")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], metavar="N", help="prefill")
    parser.add_argument("--context", type=int, default=2048, help="decode: tokens before")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    args = parser.parse_args()
    result: dict = {"what": args.what, "model": PRESETS[args.model], "versions": {}, "missing": [], "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        try:
            import torch
            import transformers
        except ImportError as error:
            result["missing"].append(f"{error}: nothing to compare with")
            return report(args, result)
        result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
        if args.device == "cuda" and not torch.cuda.is_available():
            result["missing"].append("torch sees no GPU")
            return report(args, result)
        with contextlib.suppress(ImportError):
            import triton

            result["versions"]["triton"] = triton.__version__
        without = find_mamba_ssm(args.mamba_ssm, Path(folder))
        if without:
            result["missing"].append(without)
        measure(args, result, torch, without)
        return report(args, result)


def measure(args: argparse.Namespace, result: dict, torch, without: str) -> None:
    torch.manual_seed(0)
    timer, config = Timer(args.device, 2 if args.dry_run else args.repeats), shapes(args.model, args.dry_run)
    context, lengths = (8, [16]) if args.dry_run else (args.context, args.tokens)
    if without and not args.dry_run:
        lengths = [n for n in lengths if n <= 2048]  # transformers' plain PyTorch takes 69 GB for 8k tokens
    model = None
    for what in args.what:
        if what in ("scan", "step") and without:
            continue
        try:
            if what in ("decode", "prefill") and model is None:
                begin = time.perf_counter()
                model = build(torch, config, args.device)
                result["parameters"] = sum(p.numel() for p in model.parameters())
                result["setup_seconds"] = round(time.perf_counter() - begin, 1)
            if what == "scan":
                rows = bench_scan(torch, timer, config, args.dry_run)
            elif what == "step":
                rows = bench_step(torch, timer, config, args.dry_run)
            elif what == "decode":
                rows = bench_decode(torch, timer, model, config, context)
            else:
                rows = bench_prefill(torch, timer, model, config, lengths)
            for row in rows:
                result["rows"].append(row)
                print(json.dumps(row), flush=True)
                write(args, result)
        except Exception as error:  # one that fails takes no other with it
            result["missing"].append(f"{what} failed: {type(error).__name__}: {str(error)[:500]}")
            print(result["missing"][-1], flush=True)


def report(args: argparse.Namespace, result: dict) -> int:
    for reason in result["missing"]:
        print(f"missing: {reason}", file=sys.stderr)
    write(args, result)
    return int(any(" failed: " in reason for reason in result["missing"]))


def write(args: argparse.Namespace, result: dict) -> None:
    named = ("what", "how", "tokens", "rows", "chunk")
    times = [" ".join(str(row[k]) for k in named if k in row) + f" {row['ms']:.3f} ms" for row in result["rows"]]
    result["key"] = ", ".join(times + [f"missing: {reason[:80]}" for reason in result["missing"]])
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Write what PyTorch computes with a Nemotron-H checkpoint into one .npz, to compare another implementation with.

    python scripts/dump_pytorch_reference.py CHECKPOINT OUT.npz --prompt "In the beginning"
    python scripts/dump_pytorch_reference.py CHECKPOINT OUT.npz --random 2 37 --oracle
    python scripts/dump_pytorch_reference.py --probe

Needs torch, transformers and safetensors, and no JAX: this script and the folder pytorch_reference/ beside it can be
copied to where the checkpoint is. Then `nemotron-jax compare CHECKPOINT OUT.npz` reads the file.

Variants
  hf      transformers exactly as installed and as it loaded the weights
  fixed   with the defects repaired that were found in it: what a port should match
  kernel  fixed, with the roundings of the CUDA kernels; differs from fixed in bfloat16 and float16 only

The installed transformers is probed for its known defects (--probe prints the list), and the loaded weights are
compared with the file byte for byte. Both results go into the file, as JSON, in the array `report`.

Arrays (float32 unless said; a variant's name and a slash in front, but for the inputs)
  ids (B,T) i32; pad_ids, pad_mask (R,T) i32: left-padded rows
  embed (B,T,H), layer (L,B,T,H), mixer (L,B,T,H), final (B,T,H), logits (B,T,V) of one forward without a cache
  conv (nM,B,C,K), ssm (nM,B,h,p,n), k, v (nA,B,kv,T,hd): the states after the prompt
  topk_idx (nE,B*T,k) i32 ascending, topk_w in the same order, topk_gap (nE,B*T): last chosen minus first left out
  greedy (B,N) i32, greedy_logits (B,N,V), greedy_margin (B,N): best minus second best
  full_logits (B,T+N,V): one forward without a cache over prompt and greedy tokens
  pad_logits (R,T,V), valid where pad_mask is 1; pad_greedy (R,N) i32, pad_greedy_logits (R,N,V)
  oracle/logits (B,T+N,V), oracle/conv, oracle/ssm, oracle/mtp_logits: float64, with --oracle (small models)
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import platform
import sys
import time
import warnings
from pathlib import Path

log = logging.getLogger("dump_pytorch_reference")
DTYPES = ("checkpoint", "float32", "bfloat16", "float16")
VARIANTS = ("hf", "fixed", "kernel")
SKIPPABLE = "layers,mixers,experts,states,greedy,full,pad"


class BadInput(Exception):
    """Something that the caller has to change; ends the program with status 2."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("checkpoint", nargs="?", type=Path, help="folder in Hugging Face layout")
    parser.add_argument("out", nargs="?", type=Path, help="the .npz to write")
    source = parser.add_argument_group("input (one of)").add_mutually_exclusive_group()
    source.add_argument("--prompt", nargs="+", metavar="TEXT", help="ids are cut to the shortest, pad_ids are not")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="the same, one text a line")
    source.add_argument("--ids", type=Path, metavar="FILE", help=".npy, or .npz with ids [, pad_ids, pad_mask]")
    source.add_argument("--random", nargs=2, type=int, metavar=("B", "T"), help="random ids; the default is 2 37")
    parser.add_argument("--seed", type=int, default=0, help="for --random")
    parser.add_argument("--variants", default="fixed", help="from hf,fixed,kernel, separated by commas; default: fixed")
    parser.add_argument("--dtype", choices=DTYPES, default="checkpoint")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N, or auto to spread over GPUs (accelerate)")
    parser.add_argument("--greedy", type=int, default=32, metavar="N", help="greedy tokens after the prompt")
    parser.add_argument("--skip", default="", metavar="GROUPS", help="leave out, from " + SKIPPABLE)
    parser.add_argument("--oracle", action="store_true", help="also run the float64 oracle (small models)")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--probe", action="store_true", help="only probe the installed transformers")
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout")
    return parser.parse_args(argv)


def quiet_transformers() -> None:
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()


def versions() -> dict[str, str]:
    import numpy
    import safetensors
    import torch
    import transformers

    found = {module.__name__: module.__version__ for module in (torch, transformers, safetensors, numpy)}
    found["python"] = platform.python_version()
    # Where these are installed transformers uses their CUDA kernels.
    for name in ("mamba_ssm", "causal_conv1d"):
        found[name] = "present" if importlib.util.find_spec(name) else "absent"
    return found


def read_inputs(args: argparse.Namespace, facts) -> dict:
    """ids (B, T), pad_ids and pad_mask (R, T), as torch int64 tensors on the CPU."""
    import numpy as np
    import torch

    rows: list[list[int]] | None = None
    if args.ids:
        loaded = np.load(args.ids)
        arrays = {"ids": loaded} if isinstance(loaded, np.ndarray) else {
            name: loaded[name] for name in ("ids", "pad_ids", "pad_mask") if name in loaded.files}  # fmt: skip
        if "ids" not in arrays or arrays["ids"].ndim != 2 or ("pad_ids" in arrays) != ("pad_mask" in arrays):
            raise BadInput(f"--ids {args.ids}: wanted ids of shape (B, T), with pad_ids and pad_mask or without both")
        inputs = {name: torch.from_numpy(np.asarray(value).astype(np.int64)) for name, value in arrays.items()}
    elif args.prompt or args.prompt_file:
        from transformers import AutoTokenizer

        texts = args.prompt or [line for line in args.prompt_file.read_text().splitlines() if line]
        tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
        rows = [tokenizer(text)["input_ids"] for text in texts]
        if not rows or not all(rows):
            raise BadInput("a prompt is empty")
        shortest = min(map(len, rows))
        inputs = {"ids": torch.tensor([row[:shortest] for row in rows])}
    else:
        batch, length = args.random or (2, 37)
        if batch < 1 or length < 1:
            raise BadInput(f"--random {batch} {length}: both must be at least 1")
        generator = torch.Generator().manual_seed(args.seed)
        inputs = {"ids": torch.randint(3, facts.vocab_size, (batch, length), generator=generator)}

    if "pad_ids" not in inputs:
        ids = inputs["ids"]
        if rows is None or len({len(row) for row in rows}) == 1:
            # Rows of several lengths, from none padded to all but one token padded.
            length = ids.shape[1]
            sizes = [length, max(1, length - 5), max(1, length // 2), 1]
            rows = [ids[i % ids.shape[0], length - n :].tolist() for i, n in enumerate(sizes)]
        width = max(map(len, rows))
        inputs["pad_ids"] = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        inputs["pad_mask"] = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    for name in ("ids", "pad_ids"):
        low, high = int(inputs[name].min()), int(inputs[name].max())
        if low < 0 or high >= facts.vocab_size:
            raise BadInput(f"{name} has values from {low} to {high}; the vocabulary has {facts.vocab_size}")
    return inputs


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 over the configuration and the weight files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def chosen(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := sorted(set(names) - set(allowed)):
        raise BadInput(f"{option}: {', '.join(unknown)} is none of {', '.join(allowed)}")
    return names


def dump(args: argparse.Namespace) -> dict:
    """Does it all and returns the report, whose ``problems`` lists what makes the file unfit for comparing."""
    import numpy as np
    import torch
    from pytorch_reference import defects, record, rounding
    from pytorch_reference.facts import Facts
    from pytorch_reference.model import check_weights, file_tensors, load

    started = time.monotonic()
    variants = chosen(args.variants, VARIANTS, "--variants")
    groups = set(record.GROUPS) - set(chosen(args.skip, record.GROUPS, "--skip"))
    if not variants or args.greedy < 1:
        raise BadInput("--variants names none" if not variants else f"--greedy {args.greedy}: must be at least 1")
    if not (args.checkpoint / "config.json").is_file():
        raise BadInput(f"{args.checkpoint} has no config.json")
    if args.device.startswith(("cuda", "auto")) and not torch.cuda.is_available():
        raise BadInput(f"--device {args.device}: torch sees no CUDA device")
    config = json.loads((args.checkpoint / "config.json").read_text())
    facts = Facts.read(config)
    inputs = read_inputs(args, facts)
    name = args.dtype
    if name == "checkpoint":
        name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = getattr(torch, name)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False

    log.info("probing transformers %s for its known defects", versions()["transformers"])
    findings = defects.find()
    concerned = {defect.name for defect in defects.KNOWN if defect.concerns(facts)}
    log.info("loading %s in %s on %s", args.checkpoint, name, args.device)
    model, misread = load(args.checkpoint, facts, dtype, args.device)
    as_loaded = check_weights(model, args.checkpoint, facts)
    report = {
        "checkpoint": args.checkpoint.name, "sha256": checkpoint_digest(args.checkpoint), "pattern": facts.kinds,
        "dtype": name, "device": args.device, "versions": versions(), "variants": variants,
        "defects": {f.name: {**f.as_dict(), "concerns_checkpoint": f.name in concerned} for f in findings},
        "weights": dataclasses.asdict(as_loaded), "config_misread": misread, "consistency": {}, "problems": [],
    }  # fmt: skip
    problems = report["problems"]
    arrays = {key: record.to_ids(value) for key, value in inputs.items()}

    def run(variant: str) -> None:
        log.info("running %s", variant)
        found, consistency = record.run_variant(model, facts, inputs, groups, args.greedy)
        arrays.update({f"{variant}/{key}": value for key, value in found.items()})
        report["consistency"][variant] = consistency
        if "not_finite" in consistency:
            problems.append(f"{variant}: {consistency['not_finite']} not finite")

    if "hf" in variants:  # before anything is repaired
        run("hf")
    if set(variants) & {"fixed", "kernel"}:
        problems += [f"the repair of {f.name} does not fit this transformers: {f.amount_repaired} {f.measured}"
                     for f in findings if f.name in concerned and not f.repaired]  # fmt: skip
        check_weights(model, args.checkpoint, facts, repair=True)
        with defects.repaired(model, facts):
            final_check = check_weights(model, args.checkpoint, facts)
            report["weights_repaired"] = dataclasses.asdict(final_check)
            if not final_check.clean:
                problems.append(f"the weights differ from the file: {report['weights_repaired']}")
            if "fixed" in variants:
                run("fixed")
        if "kernel" in variants:
            # The CUDA kernels' functions take the time step limit themselves.
            others = {f.name for f in findings if f.found} & concerned - {"dt_clamp", "time_step_limit_ignored"}
            with defects.repaired(model, facts, others), rounding.cuda_rounding(facts.time_step_limit):
                run("kernel")
    if args.oracle:
        log.info("running the float64 oracle")
        greedy = next((torch.from_numpy(arrays[f"{v}/greedy"]).long() for v in ("fixed", "kernel", "hf")
                       if f"{v}/greedy" in arrays), None)  # fmt: skip
        found = record.run_oracle(facts, dict(file_tensors(args.checkpoint)), inputs["ids"], greedy)
        arrays.update({f"oracle/{key}": value for key, value in found.items()})
        prompt = found["logits"][:, : inputs["ids"].shape[1]]
        report["error_against_float64"] = {
            v: {"max": float(np.abs(arrays[f"{v}/logits"] - prompt).max()),
                "relative_rms": float(np.sqrt(((arrays[f"{v}/logits"] - prompt) ** 2).mean() / (prompt**2).mean()))}
            for v in variants}  # fmt: skip
    report["seconds"] = round(time.monotonic() - started, 1)
    arrays["report"] = np.array(json.dumps(report))

    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_name(args.out.name + ".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(partial, args.out)
    return report


def probe_only() -> dict:
    from pytorch_reference import defects

    findings = {finding.name: finding.as_dict() for finding in defects.find()}
    unfit = [name for name, finding in findings.items() if not finding["repaired"]]
    return {"versions": versions(), "defects": findings, "problems": [f"{name} cannot be repaired" for name in unfit]}


def describe(report: dict) -> str:
    lines = [f"transformers {report['versions']['transformers']}, torch {report['versions']['torch']}"]
    for name, finding in report["defects"].items():
        if finding["found"]:
            state = f"found ({finding['measured']}: {finding['amount']:.3g}), "
            state += f"repaired ({finding['amount_repaired']:.3g})" if finding["repaired"] else "NOT REPAIRED"
        else:
            state = "not found"
        concern = "" if finding.get("concerns_checkpoint", True) else " [does not concern this checkpoint]"
        lines.append(f"  {name}: {state}{concern}")
    if "weights" in report:
        weights = report["weights"]
        counts = {"differ": len(weights["differing"]), "not in the file": len(weights["not_in_file"]),
                  "of mtp.* skipped": weights["skipped"]}  # fmt: skip
        tail = "".join(f", {count} {what}" for what, count in counts.items())
        lines.append(f"weights as loaded: {weights['equal']} tensors equal the file{tail}")
        for variant, error in report.get("error_against_float64", {}).items():
            lines.append(f"{variant} against float64: max {error['max']:.3g}, relative rms {error['relative_rms']:.3g}")
    lines += [f"PROBLEM: {problem}" for problem in report["problems"]]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    args = parse(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        if not args.probe and (args.checkpoint is None or args.out is None):
            raise BadInput("CHECKPOINT and OUT.npz are needed, or --probe")
        try:
            import torch
            import transformers  # noqa: F401
        except ImportError as missing:
            raise BadInput(f"{missing.name} is not installed here: pip install torch transformers") from None
        if args.threads:
            torch.set_num_threads(args.threads)
        quiet_transformers()
        report = probe_only() if args.probe else dump(args)
    except (BadInput, ValueError) as problem:
        print(f"dump_pytorch_reference: {problem}", file=sys.stderr)
        return 2
    print(describe(report), file=sys.stderr)
    if args.json:
        print(json.dumps(report))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Text from prompts: prompts and answers on stdout, logs and progress on stderr."""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_jax import cli, processes
from nemotron_jax.files import check_writable

if TYPE_CHECKING:
    from nemotron_jax.generation.text import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or hub id; default the small model that is shipped"
    )
    parser.add_argument("--prompt", action="extend", nargs="+", metavar="TEXT", help="one prompt or several")
    parser.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="a prompt a line; .jsonl: an object a line with prompt, tokens or messages",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="with --prompt-file: answers as JSONL; a killed run goes on where it stopped",
    )
    parser.add_argument(
        "--batch-size", type=cli.positive, default=8, metavar="N", help="prompts of a file at a time (default: 8)"
    )
    parser.add_argument("--stream", action="store_true", help="print text as it is written (one prompt)")
    add_sampling_arguments(parser)
    cli.add_model_arguments(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of generation that ``chat`` takes too."""
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=128, metavar="N", help="most tokens per answer (default: 128)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default): the most probable token, always")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K most probable tokens (default: 0, all)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the smallest set with probability P (default: 1, all)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="drop tokens below P times the most probable one (default: 0)",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1: tokens already there become less likely",
    )
    add(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="R",
        help="subtracted from the logits of tokens written so far",
    )
    add("--logit-bias", action="append", default=[], metavar="ID=VALUE", help="added to a token's logit; -inf bans it")
    add("--seed", type=int, default=0, metavar="N", help="of the drawing; prompt i takes N + i (default: 0)")
    add("--stop", action="extend", nargs="+", default=[], metavar="TEXT", help="ends an answer; is cut off")
    add("--eos", action="extend", nargs="+", type=int, metavar="ID", help="end tokens (default: the checkpoint's)")
    add("--ignore-eos", action="store_true", help="no end token")
    add(
        "--logprobs", type=int, metavar="N", help="log-probabilities of chosen and N most probable tokens (with --json)"
    )
    add(
        "--speculative-tokens",
        type=int,
        default=0,
        metavar="N",
        help="guesses of the multi-token-prediction head per pass; the tokens are the same (default: 0)",
    )
    add("--max-positions", type=int, metavar="N", help="longest prompt and answer together (default: the config's)")


def generator_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of a Generator from the options.

    Raises:
      ValueError: for options that contradict each other.
    """
    faults = []
    if args.eos and args.ignore_eos:
        faults.append("--eos and --ignore-eos: accepted one of them")
    bias = {}
    for entry in args.logit_bias:
        token, equals, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            faults.append(f"--logit-bias: found {entry!r}, accepted ID=VALUE")
    if faults:
        raise ValueError("; ".join(faults))
    settings: dict[str, Any] = {
        name: getattr(args, name)
        for name in (
            "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
            "logprobs", "max_positions", "speculative_tokens",
        )
    }  # fmt: skip
    settings["stop"] = tuple(args.stop)
    settings["logit_bias"] = bias or None
    if args.ignore_eos:
        settings["eos"] = None
    elif args.eos:
        settings["eos"] = tuple(args.eos)
    return settings


def run(args: argparse.Namespace) -> int:
    settings = generator_settings(args)
    check_options(args)
    from nemotron_jax.generation.prompt_files import FilePrompt, read_prompts

    prompts = [FilePrompt(p) for p in args.prompt] if args.prompt else read_prompts(args.prompt_file)
    processes.agree_on_content("prompts", [dataclasses.astuple(p) for p in prompts])
    mesh = cli.build_mesh(args)
    from nemotron_jax import load
    from nemotron_jax.generation import Generator

    tokenizer = check_settings(args, mesh, settings)
    model = load(
        args.model,
        mesh=mesh,
        dtype=args.dtype,
        fusion=args.fusion,
        mtp=args.speculative_tokens > 0,
        conversion_cache=args.conversion_cache,
    )
    if args.stream:
        settings["steps_per_call"] = 8
    generator = Generator(model, tokenizer=tokenizer, **settings)
    batch = min(args.batch_size, len(prompts)) if args.prompt_file else len(prompts)
    plan = model.plan(batch + -batch % args.data_parallel, 1, generator.steps_per_call)
    cli.tell_fallbacks(plan)
    speculation = {}
    if args.prompt_file:
        outputs = from_file(args, generator, prompts, settings, batch)
    else:
        if args.stream:
            completions = [print_stream(generator, args)]
        else:
            completions = generator.generate(list(args.prompt), seed=args.seed)
            speculation = {"proposed": completions.proposed, "accepted": completions.accepted}
        outputs = [record(p, c) for p, c in zip(prompts, completions, strict=True)]
    if args.json:
        told = {"speculation": speculation} if args.speculative_tokens and speculation else {}
        cli.print_json({"outputs": outputs, **told, **cli.what_ran(args, mesh, plan)})
    elif not (args.output or args.stream):
        for entry in outputs:
            text = " ".join(map(str, entry["tokens"])) if entry["text"] is None else entry["text"]
            print(_shown(entry["prompt"]) + text)
    return cli.DONE


def check_settings(args: argparse.Namespace, mesh: Any, settings: dict[str, Any]) -> "Tokenizer | None":
    """Refuse settings before any weights are read: the checkpoint's configuration and tokenizer are enough.

    Returns:
      The tokenizer, so that it is read once.

    Raises:
      ValueError: as the generator says it.
    """
    from nemotron_jax import NemotronH, NemotronHConfig
    from nemotron_jax.generation import Generator
    from nemotron_jax.weights.loading import default_model, locate

    folder = default_model() if args.model is None else locate(args.model)
    config = NemotronHConfig.from_json(folder)
    model = NemotronH(config, mesh=mesh, fusion=args.fusion, mtp=args.speculative_tokens > 0)
    model.folder = folder
    return Generator(model, **settings).tokenizer


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other, all at once."""
    faults = []
    if bool(args.prompt) == bool(args.prompt_file):
        faults.append("accepted one of --prompt TEXT and --prompt-file FILE")
    if args.output and not args.prompt_file:
        faults.append("--output: goes with --prompt-file")
    if args.stream and (args.prompt_file or len(args.prompt or ()) > 1):
        faults.append("--stream: goes with a single --prompt")
    if args.logprobs is not None and not (args.json or args.output):
        faults.append("--logprobs: goes with --json or --output")
    if faults:
        raise ValueError("; ".join(faults))
    if args.output:
        processes.from_first(lambda: check_writable(args.output, "a file for the answers"))


def record(prompt, completion) -> dict[str, Any]:
    """One entry of ``outputs``."""
    entry = {
        **prompt.extra,
        "prompt": prompt.prompt,
        "text": completion.text,
        "tokens": list(completion.tokens),
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        entry["logprobs"] = [{"logprob": t.logprob, "top": [list(pair) for pair in t.top]} for t in completion.logprobs]
    return entry


def from_file(
    args: argparse.Namespace, generator, prompts, settings: dict[str, Any], batch: int
) -> list[dict[str, Any]]:
    """Answer the prompts of a file in batches, going on where an earlier run stopped."""
    from tqdm import tqdm

    from nemotron_jax.generation.prompt_files import Answers

    said = {**settings, "seed": args.seed, "model": args.model, "dtype": str(generator.model.dtype)}
    name = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:12]
    generator.encode([p.prompt for p in prompts])  # a fault of the last prompt is said before the first one runs
    outputs: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        writes = args.output and processes.first()
        answers = stack.enter_context(Answers(args.output, name, prompts)) if writes else None
        known = processes.from_first(lambda: len(answers.done) if answers else 0)
        if known:
            done = answers.done if answers else [{}] * known  # only the first process prints them
            outputs += [{k: v for k, v in a.items() if k != "settings"} for a in done]
            print(f"nemotron-jax generate: {len(outputs)} answers are there already", file=sys.stderr)
        bar = stack.enter_context(
            tqdm(total=len(prompts), initial=len(outputs), unit="prompt", file=sys.stderr, disable=None)
        )
        while len(outputs) < len(prompts):
            start = len(outputs)
            chosen = prompts[start : start + batch]
            seeds = [p.seed if p.seed is not None else args.seed + start + i for i, p in enumerate(chosen)]
            completions = generator.generate([p.prompt for p in chosen], seed=seeds, rows=batch)
            new = [record(p, c) for p, c in zip(chosen, completions, strict=True)]
            if answers:
                answers.add(new)
            outputs += new
            bar.update(len(new))
    return outputs


def print_stream(generator, args: argparse.Namespace):
    """Print one answer while it is written (on stderr where stdout is for JSON); returns the completion."""
    out = sys.stderr if args.json else sys.stdout
    print(args.prompt[0], end="", flush=True, file=out)
    for piece in generator.stream(args.prompt, seed=args.seed):
        print(piece.text or "", end="", flush=True, file=out)
    print(flush=True, file=out)
    return piece.completion


def _shown(prompt) -> str:
    """A prompt in front of its answer; messages and tokens are not repeated."""
    return prompt if isinstance(prompt, str) else ""

"""Log-likelihood and perplexity of the texts of a file: each token given those before it in its window."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from nemotron_jax import cli, processes
from nemotron_jax.files import named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub id")
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help='a text; or .jsonl with one document a line: {"text": ...} or {"tokens": [...]}',
    )
    parser.add_argument(
        "--window", type=cli.positive, default=2048, metavar="N", help="predictions per window (default: 2048)"
    )
    parser.add_argument(
        "--batch-size", type=cli.positive, default=8, metavar="N", help="windows at a time (default: 8)"
    )
    cli.add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    documents = read_documents(args.file)
    processes.agree_on_content("texts", documents)
    mesh = cli.build_mesh(args)
    from tqdm import tqdm

    from nemotron_jax import load
    from nemotron_jax.generation.prompts import encode
    from nemotron_jax.generation.scoring import Total, log_likelihoods, windows

    cache = args.conversion_cache
    model = load(args.model, mesh=mesh, dtype=args.dtype, fusion=args.fusion, conversion_cache=cache)
    positions = model.config.max_position_embeddings or args.window + 1
    size = min(args.window, positions - 1)
    if size < args.window:
        print(f"nemotron-jax score: window {size}: the model has {positions} positions", file=sys.stderr)
    plan = model.plan(max(1, args.data_parallel), size)
    cli.tell_fallbacks(plan)
    rows = encode(documents, model.tokenizer, model.config.vocab_size, bos=model.config.bos_token_id)
    if not any(len(row) > 1 for row in rows):
        raise ValueError(f"{args.file}: found no text of two tokens or more: there is nothing to predict")
    cut = [list(windows(row, size)) for row in rows]
    pieces = [w for ws in cut for w in ws]
    with tqdm(total=len(pieces), unit="window", file=sys.stderr, disable=None) as bar:
        scores = log_likelihoods(model, pieces, batch_size=args.batch_size, progress=bar.update)
    total = Total.of(scores)
    start, each = 0, []
    for document, ws in zip(documents, cut, strict=True):
        part = Total.of(scores[start : start + len(ws)])
        start += len(ws)
        entry: dict[str, Any] = {
            "tokens": part.tokens,
            "nats": part.nats,
            "nats_per_token": part.nats_per_token if part.tokens else None,
        }
        if isinstance(document, str):
            entry["bytes"] = len(document.encode())
        each.append(entry)
    size_in_bytes = sum(e.get("bytes", 0) for e in each)
    every_text = all("bytes" in e for e in each)
    if args.json:
        cli.print_json(
            {
                "nats_per_token": total.nats_per_token,
                "perplexity": total.perplexity,
                "tokens": total.tokens,
                "bits_per_byte": total.nats / math.log(2) / size_in_bytes if every_text and size_in_bytes else None,
                "documents": each,
                "window": size,
                **cli.what_ran(args, mesh, plan),
            }
        )
    else:
        print(f"{total.nats_per_token:.4f} nats per token, perplexity {total.perplexity:.4f}, {total.tokens} tokens")
    return cli.DONE


def read_documents(file: Path) -> list:
    """The texts (or token lists) of a file.

    Raises:
      OSError: if the file cannot be read.
      ValueError: naming every line that holds no document.
    """
    try:
        with named(file, "a text file, or .jsonl with one document a line"):
            text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8: {error}") from error
    if file.suffix != ".jsonl":
        return [text]
    found, faults = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            found.append(entry["text"] if "text" in entry else entry["tokens"])
        except (ValueError, KeyError, TypeError):
            faults.append(f'line {number}: found {line[:60]!r}, accepted {{"text": ...}} or {{"tokens": [...]}}')
    if faults or not found:
        raise ValueError(f"{file}: " + ("; ".join(faults) or "found no line, accepted one document or more"))
    return found

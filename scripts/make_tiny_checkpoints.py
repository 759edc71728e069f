#!/usr/bin/env python3
"""Write tiny checkpoints with fresh random weights in Hugging Face layout.

    python scripts/make_tiny_checkpoints.py --out DIR [--seed N] [--only NAME,NAME] [--list]

Each lands in DIR/NAME. The same seed gives the same bytes. Needs NumPy and safetensors.
"""

import argparse
import json
import sys
from pathlib import Path

from pytorch_reference import tiny


def main() -> int:
    parser = argparse.ArgumentParser(description="Write tiny checkpoints with fresh random weights.")
    parser.add_argument("--out", type=Path, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the configurations and stop")
    args = parser.parse_args()
    if args.list:
        print(json.dumps(tiny.CONFIGS, indent=1))
        return 0
    names = args.only.split(",") if args.only else list(tiny.CONFIGS)
    unknown = sorted(set(names) - set(tiny.CONFIGS))
    if unknown or args.out is None or args.seed < 0:
        problem = f"unknown names {unknown}, known are {list(tiny.CONFIGS)}" if unknown else "--out DIR, --seed >= 0"
        print(f"make_tiny_checkpoints: {problem}", file=sys.stderr)
        return 2
    for name in names:
        print(tiny.write(args.out / name, tiny.CONFIGS[name], args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write a checkpoint in Hugging Face layout: tensor names and shapes of a released model, random bytes as values.

    python scripts/make_synthetic_checkpoint.py FOLDER         # 8 GB: 22 of the 52 layers of Nemotron-H 8B
    python scripts/make_synthetic_checkpoint.py FOLDER --model nemotron-3-ultra-550b-a55b --small
                                                               # its 51,023 tensors, each of a few numbers

Random bytes read as bfloat16 hold NaNs and infinities: such a folder is for measuring and comparing, not for running.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.shapes import checkpoint_shapes

FILE_BYTES = 5 * 10**9
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 4, "ssm_state_size": 4, "head_dim": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "moe_intermediate_size": 16, "moe_latent_size": 16,
    "moe_shared_expert_intermediate_size": 32, "intermediate_size": 32,
}  # fmt: skip


def config_of(model: str, layers: int | None, small: bool) -> NemotronHConfig:
    """The preset, cut to its first ``layers``, or with every width made small."""
    d = NemotronHConfig.preset(model).to_dict()
    if layers:
        d |= {"hybrid_override_pattern": d["hybrid_override_pattern"][:layers], "num_hidden_layers": layers}
    if small:
        d |= {key: value for key, value in SMALL.items() if d.get(key)} | {"attention_head_dim": SMALL["head_dim"]}
    return NemotronHConfig.from_dict(d)


def write(folder: Path, config: NemotronHConfig, seed: int = 0) -> int:
    """Write config, index and files of at most 5 GB; returns the bytes of the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config.to_json(folder)
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    size = total = 0
    for name, shape in checkpoint_shapes(config).items():
        count = 2 * int(np.prod(shape))
        if groups[-1] and size + count > FILE_BYTES:
            groups.append({})
            size = 0
        groups[-1][name] = shape
        size, total = size + count, total + count
    weight_map: dict[str, str] = {}
    rng = np.random.default_rng(seed)
    for i, shapes in enumerate(groups):
        file = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        weight_map |= dict.fromkeys(shapes, file)
        header, position = {}, 0
        for name, shape in shapes.items():
            count = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + count]}
            position += count
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            while position:
                step = min(position, 64 << 20)
                f.write(rng.bytes(step))
                position -= step
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="nemotron-h-8b", help="preset (default: nemotron-h-8b)")
    parser.add_argument("--layers", type=int, help="only the first so many (default: 22 of nemotron-h-8b, else all)")
    parser.add_argument("--small", action="store_true", help="every width a few numbers, all tensors kept")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    layers = args.layers or (22 if args.model == "nemotron-h-8b" and not args.small else None)
    config = config_of(args.model, layers, args.small)
    total = write(args.folder, config, args.seed)
    print(f"{args.folder}: {len(checkpoint_shapes(config))} tensors, {total / 1e9:.3f} GB")


if __name__ == "__main__":
    main()

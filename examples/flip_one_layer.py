"""Load a model, compare it with PyTorch, hand on the sum of one layer, and see what changes.

    python examples/flip_one_layer.py [REFERENCE.npz]

Runs on any machine in a minute, on four virtual CPU devices where there are no four GPUs. REFERENCE.npz was written by
scripts/dump_pytorch_reference.py from the model that ships with the package; without one the model is compared with
itself on a single device.
"""

import sys

import jax

# Before anything asks for devices; it concerns the CPU platform alone.
jax.config.update("jax_num_cpu_devices", 4)

import numpy as np  # noqa: E402

import nemotron_jax  # noqa: E402
from nemotron_jax.inspection import inspect  # noqa: E402
from nemotron_jax.parity.report import text  # noqa: E402


def main(reference: str | None = None) -> dict:
    """Print the walk, and return what it found."""
    devices = jax.devices() if len(jax.devices()) >= 4 else jax.devices("cpu")
    mesh = nemotron_jax.make_mesh(tensor=4, devices=devices)

    print("1. Load: each of four devices gets its slices, every sum is taken in its block (plan `none`).")
    model = nemotron_jax.load(mesh=mesh, dtype="float32", fusion="none")
    print(model, "\n")

    print("2. Compare.")
    if reference is None:
        whole = nemotron_jax.load(mesh=nemotron_jax.make_mesh(devices=devices), dtype="float32")
        ids = np.arange(3, 43).reshape(2, 20)
        reference = nemotron_jax.parity.record(whole, {"ids": ids}, new_tokens=8)
    comparison = nemotron_jax.compare(model, reference)
    print(text(comparison), "\n")

    print("3. What one step exchanges: an all-reduce for each block, and one for the embedding.")
    before = inspect(model)
    print(before["plan"], before["collectives"], "\n")

    print("4. Flip one layer: block 5, the attention, hands its partial sum on, and the norm of block 6 takes it.")
    letters = ["."] * model.config.num_hidden_layers
    letters[5] = "g"
    flipped = nemotron_jax.load(mesh=mesh, dtype="float32", fusion="layers:" + "".join(letters))
    after = inspect(flipped)
    print(after["plan"], after["collectives"])
    boundary = after["boundaries"][5]
    print(f"block {boundary['layer']} ({boundary['kind']}): {boundary['implementation']}\n")

    print("5. The outputs: everything before that norm is the same to the last bit, the rest to rounding.")
    ids = np.arange(3, 43).reshape(2, 20)
    one, other = (m(ids, hidden_states=True) for m in (model, flipped))
    apart = [
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(one.hidden_states.layers, other.hidden_states.layers, strict=True)
    ]
    for i, distance in enumerate(apart):
        print(f"   behind block {i:>2}: largest difference {distance:.2e}")
    return {"comparison": comparison, "before": before, "after": after, "apart": apart}


if __name__ == "__main__":
    main(*sys.argv[1:2])

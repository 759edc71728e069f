"""Measure an import on this machine: rate beside a plain read of the same files, peak memory beside the arrays.

    python scripts/bench_import.py FOLDER [--tensor-parallel N] [--cold]

Prints one JSON object. Warm: the files are in the page cache. Cold: they are put out of it before each reading.
"""

import argparse
import json
import os
import time
from pathlib import Path

import jax
import numpy as np


def drop(files: list[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def peak_memory(reset: bool = False) -> int:
    """Largest resident set so far, bytes; ``reset`` begins anew from what is resident now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def plain_read(files: list[Path]) -> tuple[int, float]:
    """Bytes and seconds of reading the files one after the other into one 8 MiB buffer."""
    buffer = bytearray(8 << 20)
    total, begun = 0, time.perf_counter()
    for file in files:
        with open(file, "rb", buffering=0) as f:
            while count := f.readinto(buffer):
                total += count
    return total, time.perf_counter() - begun


def plain_read_to_keep(files: list[Path]) -> float:
    """Seconds of reading the files into new memory, as anything that keeps them must."""
    kept, begun = [], time.perf_counter()
    for file in files:
        with open(file, "rb", buffering=0) as f:
            while (count := f.readinto(block := np.empty(8 << 20, np.uint8))) > 0:
                kept.append(block[:count])
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.tensor_parallel)
    import nemotron_jax

    mesh = nemotron_jax.make_mesh(args.tensor_parallel)
    files = [p for p in sorted(args.folder.rglob("*")) if p.is_file()]
    if not args.cold:
        plain_read(files)
    else:
        drop(files)
    total, plain = plain_read(files)
    if args.cold:
        drop(files)
    plain_read_to_keep(files)  # the machine hands out memory for the first time here: that is not the import's time
    if args.cold:
        drop(files)
    keep = plain_read_to_keep(files)
    if args.cold:
        drop(files)
    before = peak_memory(reset=True)
    begun = time.perf_counter()
    model = nemotron_jax.load(args.folder, mesh=mesh)
    seconds = time.perf_counter() - begun
    peak = peak_memory()
    arrays = sum(shard.data.nbytes for array in model.weights for shard in array.addressable_shards)
    tensors = sum(sum(1 for _ in p.layout.tensors()) for p in model.parameters)
    print(
        json.dumps(
            {
                "folder_bytes": total,
                "tensors": tensors,
                "import_seconds": round(seconds, 2),
                "import_GB_per_s": round(total / seconds / 1e9, 3),
                "plain_read_GB_per_s": round(total / plain / 1e9, 3),
                "plain_read_to_keep_GB_per_s": round(total / keep / 1e9, 3),
                "share_of_plain_read": round(plain / seconds, 3),
                "share_of_plain_read_to_keep": round(keep / seconds, 3),
                "microseconds_per_tensor": round(seconds / tensors * 1e6, 1),
                "array_bytes": arrays,
                "peak_beyond_start_and_arrays_bytes": peak - before - arrays,
                "tensor_parallel": args.tensor_parallel,
                "cold": args.cold,
            }
        )
    )


if __name__ == "__main__":
    main()

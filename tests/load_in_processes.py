"""One of several processes that load a model together; prints what it read, and what it holds, as JSON."""

import hashlib
import json
import sys

import jax
import numpy as np


def main(folder: str, port: str, processes: str, index: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(index))
    import nemotron_jax
    from nemotron_jax.weights.huggingface import Checkpoint

    read, compiled = [], []
    pread = Checkpoint._pread
    Checkpoint._pread = lambda self, tensor, offset, out: (read.append(out.nbytes), pread(self, tensor, offset, out))[1]
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "compile" in event else None
    )
    model = nemotron_jax.load(folder, mesh=nemotron_jax.make_mesh(int(processes)), verify=False)
    shares = {}
    for p, array in zip(model.parameters, model.weights, strict=True):
        (shard,) = array.addressable_shards
        shares[".".join(map(str, p.path))] = hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
    found = {"read": sum(read), "compiled": list(compiled), "shares": shares, "bytes": model.bytes_per_device()}
    try:
        nemotron_jax.save(model, "none")
    except ValueError as error:
        found["refused"] = str(error)
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

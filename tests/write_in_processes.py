"""One of several processes that write a model together, well and badly; what was raised goes into a file each.

    python -m tests.write_in_processes FOLDER OUT TENSOR DATA [killed]

Two devices belong to each process. ``killed``: process 1 is, in the middle of a save.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import jax


def main(folder: str, out: str, tensor: str, data: str, how: str = "") -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    import nemotron_jax
    from nemotron_jax import processes
    from nemotron_jax.weights import gathering, held

    gathering.BUFFERS = (1024, 8192)  # so that tensors of these sizes take several
    processes.join(processes.settings())
    here, me = Path(out), processes.index()
    model = nemotron_jax.load(folder, mesh=nemotron_jax.make_mesh(int(tensor), int(data)))
    nemotron_jax.export(model, here / "exported")
    nemotron_jax.save(model, here / "saved")
    # A cache that each process has for itself, as on machines without a common disk.
    nemotron_jax.load(folder, mesh=model.mesh, conversion_cache=here / "caches" / str(me), verify=True)
    if how == "killed":
        share, calls = held.Held.share, []

        def dies(*args):
            calls.append(1)
            if len(calls) == 3 and me == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return share(*args)

        held.Held.share = dies
        nemotron_jax.save(model, here / "saved")
        return
    said = []

    def refused(write, *args):
        try:
            write(*args)
            said.append("")
        except (ValueError, OSError) as error:
            said.append(str(error))

    refused(nemotron_jax.export, model, here / "exported")  # which is not empty
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if me == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # a full disk
    refused(nemotron_jax.save, model, here / "saved")
    refused(nemotron_jax.export, model, here / "none")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    share = held.Held.share

    def fails(self, index, rank):
        if index > 3 and me == 1:
            raise MemoryError("no room")
        return share(self, index, rank)

    held.Held.share = fails
    refused(nemotron_jax.save, model, here / "saved")
    held.Held.share = share
    refused(nemotron_jax.convert, here / "nowhere", here / "none")
    refused(nemotron_jax.convert, here / "saved", here / "back")
    (here / f"said-{me}.json").write_text(json.dumps(said))
    processes.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""``save``, ``export`` and ``convert``: whole folders, written so that an interruption leaves what was there before."""

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import jax

from nemotron_jax import processes
from nemotron_jax.config import NemotronHConfig
from nemotron_jax.runtime import NemotronH
from nemotron_jax.shapes import checkpoint_shapes
from nemotron_jax.weights.gathering import write_by_first
from nemotron_jax.weights.held import Held
from nemotron_jax.weights.huggingface import INDEX
from nemotron_jax.weights.loading import locate, may_skip, open_source
from nemotron_jax.weights.orbax import is_orbax
from nemotron_jax.weights.source import FLOATS, Source, listed
from nemotron_jax.weights.writing import HUGGINGFACE, ORBAX, write

logger = logging.getLogger("nemotron_jax")


def save(model: NemotronH, path: str | Path, *, progress: bool | None = None) -> None:
    """Save a model's weights as an Orbax checkpoint that :func:`~nemotron_jax.load` restores onto any mesh.

    The folder appears, or an earlier checkpoint of this format in it is replaced, in one step when everything is
    written. Config, tokenizer and generation files of the folder that the model was loaded from travel along. A
    tensor keeps the dtype of the file it was loaded from, where the model's array has all of its values.

    Args:
      model: any model with weights. Where it is spread over processes that have joined (processes.py), all of them call
        this together, and process 0 writes: see :mod:`nemotron_jax.weights.gathering`.
      path: the folder. It may not exist, be empty, or hold an earlier checkpoint of this format.
      progress: a progress bar on stderr; default where stderr is a terminal.

    Raises:
      ValueError: if the path holds something else, or the disk has no room, or writing failed, in all processes. What
        was there is untouched.
    """

    def put(held: Held) -> None:
        check_replaceable(Path(path))
        write(Path(path), ORBAX, held, model.config, model.folder, progress=progress)

    write_by_first(model, put)


def export(model: NemotronH, path: str | Path, *, overwrite: bool = False, progress: bool | None = None) -> None:
    """Write a model's weights in Hugging Face layout: names, dtypes and files of the checkpoint that it came from.

    Args:
      model: any model with weights, as for :func:`save`.
      path: the folder. It may not exist or be empty.
      overwrite: also replace a checkpoint.
      progress: a progress bar on stderr; default where stderr is a terminal.

    Raises:
      ValueError: as for :func:`save`.
    """

    def put(held: Held) -> None:
        check_replaceable(Path(path), overwrite)
        write(Path(path), HUGGINGFACE, held, model.config, model.folder, progress=progress)

    write_by_first(model, put)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What :func:`convert` did.

    Attributes:
      tensors: checkpoint tensors carried over.
      bytes: of them, as written.
      seconds: it took.
      format: what was written, ``orbax`` or ``huggingface``.
    """

    tensors: int
    bytes: int
    seconds: float
    format: str


def convert(
    source: str | Path,
    target: str | Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Conversion:
    """Convert a folder or hub id in Hugging Face layout to Orbax, or an Orbax folder back. No device is used.

    Every tensor is carried, ``mtp.*`` too. Quantised weights come out in bfloat16. Processes that have joined
    (processes.py) call it together, and process 0 converts.

    Args:
      source: where from.
      target: where to; a folder that does not exist or is empty, or an Orbax folder of ours.
      revision: of a hub id: branch, tag or commit.
      overwrite: also replace a checkpoint in Hugging Face layout.
      progress: a progress bar on stderr; default where stderr is a terminal.

    Raises:
      FileNotFoundError, ValueError: if the source is incomplete or damaged, the target cannot be replaced, or writing
      failed.
        The source is only read; the target is whole, old or new.
    """
    if processes.active():
        jax.process_count()  # which Orbax asks for: the answer takes all processes
    return Conversion(**processes.from_first(lambda: _convert(source, target, revision, overwrite, progress)))


def _convert(
    source: str | Path, target: str | Path, revision: str | None, overwrite: bool, progress: bool | None
) -> dict[str, Any]:
    """The fields of a Conversion."""
    begun = time.perf_counter()
    folder = locate(source, revision=revision)
    config = NemotronHConfig.from_json(folder)
    opened = open_source(folder, config)
    check_complete(opened, config)
    kind = HUGGINGFACE if is_orbax(folder) else ORBAX
    if folder.resolve() == Path(target).resolve():
        raise ValueError(f"{target} is the source itself; accepted: another folder")
    check_replaceable(Path(target), overwrite)
    write(Path(target), kind, opened, config, folder, progress=progress)
    opened.close()
    done = Conversion(len(opened.tensors), opened.bytes(), time.perf_counter() - begun, kind)
    return dataclasses.asdict(done)


def check_complete(source: Source, config: NemotronHConfig) -> None:
    """Every tensor that the config asks for is there, and nothing else that is not known.

    Raises:
      ValueError: naming every tensor that is missing, unknown, of another shape or of a dtype that is no plain float.
    """
    expected = checkpoint_shapes(config, prefix="")
    found = source.tensors
    faults = []
    drafting = [name for name in expected if name.startswith("mtp.")]
    if drafting and not any(name.startswith("mtp.") for name in found):
        logger.warning("%s: its config has MTP layers, but it holds no mtp.* tensors", source.where)
        expected = {name: shape for name, shape in expected.items() if not name.startswith("mtp.")}
    faults += [f"missing {name} {shape}" for name, shape in expected.items() if name not in found]
    for name, t in found.items():
        if name not in expected:
            if not may_skip(config, t.name) and not (config.tie_word_embeddings and name == "lm_head.weight"):
                faults.append(f"unknown {t.name} {t.shape}")
        elif t.shape != expected[name]:
            faults.append(f"{t.name} has shape {t.shape}, accepted {expected[name]}")
        elif t.dtype not in FLOATS:
            faults.append(f"{t.name} has dtype {t.dtype}, accepted {', '.join(FLOATS)}")
    if faults:
        raise ValueError(f"{source.where} does not fit its config: {listed(faults)}")


def check_replaceable(path: Path, overwrite: bool = False) -> None:
    """Whether a folder may be written.

    Raises:
      ValueError: if something else is there.
    """
    above = next((p for p in path.absolute().parents if p.exists()), path.parent)
    if not above.is_dir():
        raise ValueError(f"{path}: {above} is a file; accepted: a folder to write to")
    if not path.exists() or is_orbax(path):
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; accepted: a folder to write to")
    if not any(path.iterdir()):
        return
    weights = (path / INDEX).exists() or any(path.glob("*.safetensors"))
    if not (overwrite and weights and (path / "config.json").exists()):
        accepted = "a new or empty folder, or an Orbax checkpoint of this program"
        hint = "; to replace the checkpoint there, ask for it (overwrite)" if weights else ""
        raise ValueError(f"{path} is not empty; accepted: {accepted}{hint}")

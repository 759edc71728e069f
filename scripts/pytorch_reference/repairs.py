"""What turns transformers' model into the one that was trained: the repairs that make the variant ``fixed``.

Each is a context, so that the same loaded model also runs unrepaired. ``defects.py`` has the probes that tell whether
the installed transformers needs them.
"""

import contextlib

import torch.nn.functional as F
from transformers.models.nemotron_h import modeling_nemotron_h as hf


@contextlib.contextmanager
def hooks():
    """A list to put hook handles in; they are removed at the end."""
    handles: list = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def mixers(model, kind: str):
    return [layer.mixer for layer in model.model.layers if layer.block_type == kind]


@contextlib.contextmanager
def time_step_limit(model, limit: tuple[float, float]):
    """Clamp dt to the configuration's limit, in the many-token and in the one-token path."""
    scan, update = hf.mamba2_chunk_scan, hf.mamba2_selective_state_update

    def limited_scan(*args, **kwargs):
        return scan(*args, **{**kwargs, "dt_limit": limit})

    def limited_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, **kwargs):
        # The one-token function takes no limit, so it is handed a dt that is ready.
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*limit)
        return update(state, x, dt, A, B, C, D, z=z, dt_bias=None, dt_softplus=False, **kwargs)

    hf.mamba2_chunk_scan, hf.mamba2_selective_state_update = limited_scan, limited_update
    try:
        yield
    finally:
        hf.mamba2_chunk_scan, hf.mamba2_selective_state_update = scan, update


@contextlib.contextmanager
def float32_residual(model):
    """Keep the stream between the blocks in float32, as residual_in_fp32 asks.

    Each block adds its output to what it was given, and its norm casts on its own, so widening the first block's
    input is enough; the head wants its weight's dtype back.
    """

    def widen(module, args, kwargs):
        if args:
            return (args[0].float(), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].float()}

    with hooks() as handles:
        handles.append(model.model.layers[0].register_forward_pre_hook(widen, with_kwargs=True))
        handles.append(model.lm_head.register_forward_pre_hook(lambda m, args: (args[0].to(m.weight.dtype),)))
        yield


@contextlib.contextmanager
def silent_pads(model):
    """Zero in_proj's output at pads, where its bias would leak into the convolution of the first real tokens."""
    current: dict = {}

    def note(module, args, kwargs):
        current["mask"] = kwargs.get("attention_mask")

    def silence(module, args, output):
        mask = current["mask"]
        return output if mask is None else output * mask[..., None].to(output.dtype)

    with hooks() as handles:
        for mixer in mixers(model, "linear_attention"):
            handles.append(mixer.register_forward_pre_hook(note, with_kwargs=True))
            handles.append(mixer.in_proj.register_forward_hook(silence))
        yield


@contextlib.contextmanager
def tied_head(model):
    """Let the head use the embedding matrix."""
    untied = model.lm_head.weight
    model.lm_head.weight = model.model.embeddings.weight
    try:
        yield
    finally:
        model.lm_head.weight = untied

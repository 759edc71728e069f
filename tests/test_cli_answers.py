"""Bad options get one answer that names what was found and what is accepted, before anything is made."""

import jax.numpy as jnp
import pytest

from nemotron_jax import NemotronH, cli
from nemotron_jax.generation import Generator
from tests import tiny


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["inspect", "--context", "999999999999"], "found 999999999999, accepted 1 to"),
        (["generate", "--prompt", "a", "--tensor-parallel", "0"], "found 0, accepted 1 to"),
        (["generate", "--prompt", "a", "--tensor-parallel", "1000000"], "accepted at most 256 virtual CPU devices"),
        (["compare", "reference.npz", "--variant", "zzz"], "invalid choice: 'zzz'"),
        (["compare", "reference.npz", "--tolerance", "nan"], "found nan, accepted a number of 0 or more"),
        (["compare", "reference.npz", "--tolerance", "-1"], "found -1, accepted a number of 0 or more"),
        (["bench", "decode", "--steps", "5", "2"], "found 5 2, accepted two numbers"),
        (["bench", "decode", "--steps", "4", "6"], "found 4 6, accepted two numbers"),
    ],
)
def test_bad_numbers(command, named, capsys):
    try:
        status = cli.main(command)
    except SystemExit as stop:  # argparse answers by itself
        status = stop.code
    out, err = capsys.readouterr()
    assert status == cli.BAD_INPUT and out == ""
    assert named in err


def test_logits_that_are_no_numbers_are_no_answer():
    """Damaged weights must not look like an empty text."""
    model = NemotronH(tiny.config(hybrid_override_pattern="M-"), rngs=0)
    path = ("layers", 0, "mixer", "in_proj")
    model.replace_weights({path: jnp.full_like(model.parameter(*path), jnp.nan)})
    with pytest.raises(FloatingPointError, match=r"NaN.* rows \[0\]"):
        Generator(model, max_new_tokens=4).generate([[1, 2, 3]])

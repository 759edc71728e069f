"""Random shapes, degrees, plans, lengths, paddings and cuts against one device in one forward."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from nemotron_jax import NemotronH, ShardingRules, make_mesh
from nemotron_jax.sharding import check_degree
from tests import tiny


@st.composite
def cases(draw):
    """A config, a mesh that fits it, a plan, and how four rows of text are padded and cut."""
    kinds = "".join(draw(st.lists(st.sampled_from("M*-E"), min_size=1, max_size=3)))
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    shape = dict(
        hybrid_override_pattern=kinds,
        n_groups=draw(st.sampled_from([1, 2, 4, 8])),
        num_key_value_heads=kv,
        conv_kernel=draw(st.sampled_from([2, 3, 4])),
        chunk_size=draw(st.sampled_from([4, 8, 16])),
        use_conv_bias=draw(st.booleans()),
        use_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        vocab_size=draw(st.sampled_from([96, 101])),
        residual_in_fp32=draw(st.booleans()),
        time_step_limit=draw(st.sampled_from([[0.0, 1e308], [0.01, 0.05]])),
    )
    if "E" in kinds:
        shape |= dict(
            n_routed_experts=8,
            num_experts_per_tok=draw(st.sampled_from([1, 3])),
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=24,
            moe_latent_size=draw(st.sampled_from([None, 20])),
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
    rules = ShardingRules.from_dict(draw(st.sampled_from([{}, {"experts": "tensor"}, {"mlp": "none"}])))
    config = tiny.config(**shape)
    mesh = draw(st.sampled_from([(2, 1), (4, 1), (8, 1), (2, 2), (4, 2)]))
    plan = draw(st.sampled_from(["none", "all/gather", "all/psum", "kinds:M/gather"]))
    length = draw(st.integers(1, 20))
    rows = [draw(st.integers(0, length)) for _ in range(4)]
    side = draw(st.sampled_from(["left", "right"]))
    cut = draw(st.integers(0, length))
    return config, rules, mesh, plan, length, rows, side, cut, draw(st.integers(0, 1000))


@pytest.mark.full
@hypothesis.settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(cases())
def test_any_case(count_case, case):
    config, rules, (tensor, data), plan, length, rows, side, cut, seed = case
    try:
        check_degree(config, tensor, rules)
    except ValueError:
        tensor = 2
    ids = tiny.tokens(seed, 4, length, vocab=config.vocab_size)
    place = np.arange(length)
    mask = np.stack([place >= length - n if side == "left" else place < n for n in rows])
    plain = NemotronH(config, rngs=seed, fusion="none")
    cutted = NemotronH(config, mesh=make_mesh(tensor, data), rules=rules, fusion=plan, rngs=seed)
    first = cutted(ids[:, :cut], mask=mask[:, :cut])
    second = cutted(ids[:, cut:], cache=first.cache, mask=mask[:, cut:])
    found = np.concatenate([np.asarray(first.logits), np.asarray(second.logits)], 1)
    expected = np.asarray(plain(ids, mask=mask).logits)
    tiny.close(found[mask], expected[mask], 1e-4)
    count_case()


@pytest.mark.parametrize("rules", [{"mlp": "none"}, {"experts": "tensor"}, {}])
def test_zero_tokens_through_experts(rules, count_case):
    """A piece without tokens is still a summand where the block is cut (a random case found it otherwise)."""
    shape = dict(
        hybrid_override_pattern="E",
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=24,
    )
    model = NemotronH(
        tiny.config(**shape), mesh=make_mesh(2), rules=ShardingRules.from_dict(rules), rngs=0, fusion="none"
    )
    assert model(np.zeros((2, 0), np.int32)).logits.shape == (2, 0, 96)
    count_case()

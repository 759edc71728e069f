"""Scores of texts: against the model's own logits, and against PyTorch's held-out loss."""

import numpy as np
import pytest

from nemotron_jax.generation import Total, log_likelihoods, scoring
from nemotron_jax.generation.scoring import windows
from tests import tiny
from tests.generation_cases import reference, trained


def rows(lengths=(9, 1, 30, 2, 17), vocab=96):
    return [tiny.tokens(i, n, vocab=vocab).tolist() for i, n in enumerate(lengths)]


def plain(model, row):
    logits = np.asarray(model(np.array([row])).logits, np.float64)[0, :-1]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs[np.arange(len(row) - 1), row[1:]], logits.argmax(-1) == row[1:]


@pytest.mark.parametrize(("tensor", "data", "piece"), [(1, 1, 2048), (4, 2, 8), (1, 1, 7)])
def test_scores_are_those_of_the_logits(tensor, data, piece, monkeypatch, count_case):
    monkeypatch.setattr(scoring, "MAX_LOGITS", 500)  # the head sees a few positions at a time
    vocab = 93  # does not divide
    model = tiny.model(tensor, data, fusion="all/gather", vocab_size=vocab, seed=len(str(piece)))
    one = tiny.model(vocab_size=vocab, seed=len(str(piece)))
    given = rows(vocab=vocab)
    given[2][4:9] = np.asarray(one(np.array([given[2][:4]])).logits)[0, -1].argsort()[-1:].tolist() * 5
    done = []
    scores = log_likelihoods(model, given, batch_size=3, piece=piece, progress=done.append)
    assert sum(done) == len(given)
    for row, score in zip(given, scores, strict=True):
        logprobs, greedy = plain(one, row)
        assert score.tokens == tuple(row)
        np.testing.assert_allclose(score.logprobs, logprobs, atol=2e-5)
        np.testing.assert_array_equal(score.greedy, greedy)
    assert scores[2].greedy.any() and not scores[2].greedy.all()
    count_case()


def heldout(count, batch_size):
    ids = reference()["heldout_ids"][:count]
    return Total.of(log_likelihoods(trained(1), ids, batch_size=batch_size))


def test_one_heldout_window_equals_the_plain_call():
    total = heldout(2, 2)
    expected = np.concatenate([plain(trained(1), row.tolist())[0] for row in reference()["heldout_ids"][:2]])
    assert total.tokens == 512
    np.testing.assert_allclose(total.nats_per_token, -expected.mean(), atol=1e-5)


@pytest.mark.full
def test_heldout_loss_equals_pytorch(count_case):
    total = heldout(64, 8)
    assert total.tokens == 64 * 256
    np.testing.assert_allclose(total.nats_per_token, reference()["heldout_nats"], atol=1e-5)
    count_case()


def test_windows_predict_every_token_once():
    for n in (1, 2, 8, 9, 10, 17, 25):
        cut = list(windows(list(range(n)), 8))
        assert [t for w in cut for t in w[1:]] == list(range(1, n))
        assert all(len(w) <= 9 for w in cut)


def test_answers_to_bad_texts():
    model = tiny.model(max_position_embeddings=16)
    for bad, said in [
        ([[1], []], "prompt 1"),
        ([[1] * 17], "text 0: found 17"),
        ([[96]], "token 96"),
        (["x"], "no tokenizer"),
    ]:
        with pytest.raises(ValueError, match=said):
            log_likelihoods(model, bad)
    with pytest.raises(ValueError, match="batch_size"):
        log_likelihoods(model, [[1, 2]], batch_size=0)
    assert log_likelihoods(model, []) == []
    assert np.isnan(Total.of(log_likelihoods(model, [[5]])).nats_per_token)

"""Laws of the multi-token-prediction drafter."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import tiny_models as models
from drafters import mtp_oracle
from metrale_jax import config as config_lib
from metrale_jax import state as state_lib
from metrale_jax import steps
from metrale_jax.drafters import mtp
from metrale_jax.model import params as params_lib

PROMPTS = ([5, 17, 3, 99, 21, 8, 64], [2], [101, 7, 7, 7])
NUM_DRAFTS = models.MAX_DRAFTS
NUM_CANDIDATES = 5
# Of log-probabilities and rows of order 1, between float32 and float64, or between
# forwards of different width.
ABSOLUTE_TOLERANCE = 1e-4

# Per round and slot: drafts offered, and how many of them are right.
SCRIPTS = {
    "always right": [((3, 3), (3, 3), (3, 3))] * 4,
    "never right": [((3, 0), (3, 0), (3, 0))] * 4,
    "mixed": [
        ((3, 1), (3, 0), (0, 0)),
        ((3, 2), (2, 1), (3, 3)),
        ((1, 0), (3, 3), (3, 2)),
        ((0, 0), (3, 2), (2, 1)),
    ],
}
SAMPLING = {"greedy": {}, "sampled": dict(temperature=1.0, top_k=40, top_p=0.95)}


class Target(NamedTuple):
    config: config_lib.ModelConfig
    params: params_lib.ModelParams
    drafter: mtp.MtpDrafter


def make_target(kind):
    config = dataclasses.replace(models.CONFIGS[kind], num_mtp_layers=1)
    params = params_lib.init_params(config, rng_key=jax.random.key(0), with_mtp=True)
    return Target(config, params, make_drafter(config, params))


def make_drafter(config, params, **options):
    options = dict(num_drafts=NUM_DRAFTS, num_candidates=NUM_CANDIDATES) | options
    return mtp.mtp_drafter(params, config, **options)


@pytest.fixture(
    params=["dense", pytest.param("moe", marks=pytest.mark.slow)], scope="module"
)
def target(request):
    return make_target(request.param)


@pytest.fixture(scope="module")
def dense():
    return make_target("dense")


def start_all(target, sequences=PROMPTS, batch=None, **options):
    """A batch whose slots decode; the target's final hiddens [T, M] of each slot."""
    if batch is None:
        batch = models.make_state(target.config, target.drafter)
    hiddens = []
    for slot, tokens in enumerate(sequences):
        batch, hidden = start(target, batch, slot, tokens, seed=slot, **options)
        hiddens.append(hidden)
    return batch, hiddens


def start(target, batch, slot, tokens, chunks=None, **options):
    """As `models.start`; returns the target's final hiddens [T, M] too."""
    request = models.make_request(target.config, slot, **options)
    batch = steps.insert(batch, jnp.int32(slot), request)
    if chunks is None:
        num_full, rest = divmod(len(tokens), models.CHUNK_LENGTH)
        chunks = [models.CHUNK_LENGTH] * num_full + [rest] * (rest > 0)
    done = 0
    hiddens = []
    for size in chunks:
        chunk = [*tokens[done : done + size], *[0] * (models.CHUNK_LENGTH - size)]
        done += size
        batch, output = steps.prefill(
            target.params,
            batch,
            jnp.array([slot], jnp.int32),
            jnp.array([chunk], jnp.int32),
            jnp.array([size], jnp.int32),
            jnp.array([done == len(tokens)]),
            target.drafter,
            config=target.config,
        )
        hiddens.append(np.asarray(output.hidden)[0, :size])
    assert done == len(tokens)
    return batch, np.concatenate(hiddens)


@functools.partial(jax.jit, static_argnames="config")
def propose(params, batch, drafter, *, config):
    return drafter.propose(params, batch, config=config, implementation=None)


def propose_with(target, batch, drafter=None):
    drafter = target.drafter if drafter is None else drafter
    return propose(target.params, batch, drafter, config=target.config)


def run_round(target, batch, drafts, counts):
    """Judges the given drafts, and leaves the drafter's own pending."""
    pending = dataclasses.replace(
        batch.proposal,
        drafts=jnp.array(drafts, jnp.int32),
        num_drafts=jnp.array(counts, jnp.int32),
    )
    batch = dataclasses.replace(batch, proposal=pending)
    return decode_one_round(target, batch)


def decode_one_round(target, batch):
    # One round a call: the same compiled program serves every test.
    return steps.decode_rounds(
        target.params, batch, target.drafter, num_rounds=1, config=target.config
    )


NO_DRAFTS = [[0] * NUM_DRAFTS] * models.NUM_SLOTS


@functools.cache
def tokens_without_drafts(kind):
    """What each slot emits in rounds that have no drafts."""
    target = make_target(kind)
    batch, _ = start_all(target)
    for _ in range(20):
        batch, _ = run_round(target, batch, NO_DRAFTS, [0, 0, 0])
    return [emitted(batch, slot) for slot in range(models.NUM_SLOTS)]


def kind_of(target):
    return "dense" if target.config.moe is None else "moe"


def emitted(batch, slot):
    return models.output_tokens(batch, slot, len(PROMPTS[slot]))


def run_script(target, batch, script):
    expected = tokens_without_drafts(kind_of(target))
    for round_script in script:
        drafts = []
        for slot, (_, num_right) in enumerate(round_script):
            done = len(emitted(batch, slot))
            right = expected[slot][done : done + NUM_DRAFTS]
            wrong = [(token + 1) % models.VOCAB_SIZE for token in right]
            drafts.append(right[:num_right] + wrong[num_right:])
        counts = [count for count, _ in round_script]
        batch, emission = run_round(target, batch, drafts, counts)
        assert emission.count.tolist() == [right + 1 for _, right in round_script]
    return batch


def committed_tokens(batch):
    """Of each slot, the tokens inside the caches."""
    return [
        np.asarray(batch.tokens)[slot, : int(batch.length[slot])].tolist()
        for slot in range(models.NUM_SLOTS)
    ]


def drafter_rows(batch, slot):
    """The drafter's keys and values of a slot, below its length."""
    pages = np.asarray(batch.page_table)[slot]
    length = int(batch.length[slot])
    return {
        name: np.asarray(getattr(batch.drafter.cache, name))[pages].reshape(
            -1, *batch.drafter.cache.keys.shape[2:]
        )[:length]
        for name in ("keys", "values")
    }


def assert_near(actual, expected, message=""):
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=ABSOLUTE_TOLERANCE, err_msg=message
    )


def assert_same_drafter(actual, proposal, expected, expected_proposal, slot):
    """A slot's rows, newest output and drafts are those of another batch's slot."""
    rows = drafter_rows(expected, slot)
    for name, value in drafter_rows(actual, slot).items():
        assert_near(value, rows[name], name)
    assert_near(actual.drafter.hidden[slot], expected.drafter.hidden[slot])
    np.testing.assert_array_equal(proposal.drafts[slot], expected_proposal.drafts[slot])
    assert_near(proposal.log_probs[slot], expected_proposal.log_probs[slot])


@pytest.mark.parametrize("name", SCRIPTS)
def test_drafts_and_rows_equal_a_full_recompute(target, name):
    batch, _ = start_all(target)
    batch = run_script(target, batch, SCRIPTS[name])
    # The hiddens of the same tokens, from a run that never drafted.
    _, hiddens = start_all(target, committed_tokens(batch))
    for slot, hidden in enumerate(hiddens):
        tokens = np.asarray(batch.tokens)[slot, : len(hidden) + 1].tolist()
        drafts = batch.proposal.drafts[slot].tolist()
        expected = mtp_oracle.recompute(
            target.params, target.config, tokens, hidden, drafts
        )
        log_probs = scipy.special.log_softmax(expected.logits, axis=-1)
        assert drafts == np.argmax(log_probs, axis=-1).tolist()
        assert_near(batch.proposal.log_probs[slot], np.max(log_probs, axis=-1))
        best = np.argsort(-log_probs, axis=-1)[:, :NUM_CANDIDATES]
        np.testing.assert_array_equal(batch.proposal.candidates[slot], best)
        rows = drafter_rows(batch, slot)
        assert_near(rows["keys"], expected.keys)
        assert_near(rows["values"], expected.values)


@pytest.mark.parametrize("name", SCRIPTS)
def test_rounds_leave_the_drafter_that_a_prefill_builds(target, name):
    batch, _ = start_all(target)
    batch = run_script(target, batch, SCRIPTS[name])
    rebuilt, _ = start_all(target, committed_tokens(batch))
    assert rebuilt.last_token.tolist() == batch.last_token.tolist()
    proposal = propose_with(target, rebuilt)
    for slot in range(models.NUM_SLOTS):
        assert_same_drafter(batch, batch.proposal, rebuilt, proposal, slot)


def test_rejected_drafts_leave_no_trace(target):
    def run(drafts, counts):
        batch, _ = start_all(target)
        batch, emission = run_round(target, batch, drafts, counts)
        assert emission.count.tolist() == [1, 1, 1]
        return batch

    expected = tokens_without_drafts(kind_of(target))
    clean = run(NO_DRAFTS, [0, 0, 0])
    for shift in (1, 2):
        wrong = [(tokens[1] + shift) % models.VOCAB_SIZE for tokens in expected]
        batch = run([[token] * NUM_DRAFTS for token in wrong], [3, 2, 3])
        jax.tree.map(np.testing.assert_array_equal, batch.drafter, clean.drafter)
        jax.tree.map(
            np.testing.assert_array_equal,
            dataclasses.replace(batch.proposal, num_drafts=clean.proposal.num_drafts),
            clean.proposal,
        )


def test_proposing_stores_nothing(target):
    batch, _ = start_all(target)
    first = propose_with(target, batch)
    again = propose_with(target, batch)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert first.num_drafts.tolist() == [NUM_DRAFTS] * models.NUM_SLOTS


@pytest.mark.parametrize("chunks", [(4, 3, 4), (1, 10), (10, 1), (1,) * 11], ids=str)
def test_any_split_of_a_prompt_gives_the_same_drafter(target, chunks):
    prompt = [*PROMPTS[0], *PROMPTS[2]]
    whole, _ = start(target, start_all(target)[0], 1, prompt)
    split, _ = start(target, start_all(target)[0], 1, prompt, chunks)
    assert int(split.length[1]) == len(prompt)
    assert_same_drafter(
        split, propose_with(target, split), whole, propose_with(target, whole), 1
    )


def test_every_tensor_of_the_head_matters(target):
    def log_probs(head):
        changed = target._replace(
            drafter=dataclasses.replace(target.drafter, params=head)
        )
        batch, _ = start_all(changed)
        return np.asarray(propose_with(changed, batch).log_probs)

    head = target.params.mtp
    expected = log_probs(head)
    leaves, treedef = jax.tree.flatten(head)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(head)]
    for index, path in enumerate(paths):
        noise = jax.random.normal(jax.random.key(index), leaves[index].shape)
        perturbed = list(leaves)
        perturbed[index] = leaves[index] + 0.2 * noise
        change = np.abs(log_probs(treedef.unflatten(perturbed)) - expected)
        assert np.max(change) > 1e-3, jax.tree_util.keystr(path)


@pytest.mark.parametrize("half", ["embedding", "hidden"])
def test_the_embedding_half_of_the_fusion_comes_first(dense, half):
    width = dense.config.hidden_size
    head = dense.params.mtp
    zeros = jnp.zeros((width, width), jnp.float32)
    halves = [head.fc[:, :width], head.fc[:, width:]]
    halves[0 if half == "hidden" else 1] = zeros
    head = dataclasses.replace(head, fc=jnp.concatenate(halves, axis=1))

    def log_probs(**changes):
        changed = dense._replace(
            drafter=dataclasses.replace(
                dense.drafter, params=dataclasses.replace(head, **changes)
            )
        )
        batch, _ = start_all(changed)
        return np.asarray(propose_with(changed, batch).log_probs)

    noise = jax.random.normal(jax.random.key(1), (width,))
    expected = log_probs()
    for name in ("embedding", "hidden"):
        field = f"{name}_norm"
        actual = log_probs(**{field: getattr(head, field) + noise})
        assert np.array_equal(actual, expected) == (name != half), name


def test_stale_contents_and_other_slots_change_no_bit(target):
    """Everything is NaN before slot 1 starts; other slots run beside it or don't."""

    def of_slot_1(tree):
        return jax.tree.map(lambda leaf: np.asarray(leaf[1]), tree)

    def run(poisoned):
        batch = models.make_state(target.config, target.drafter)
        if poisoned:
            batch = jax.tree.map(models.poison, batch).replace(
                active=batch.active, page_table=batch.page_table
            )
            batch, _ = start(target, batch, 2, PROMPTS[2])
        batch, _ = start(target, batch, 1, PROMPTS[0], seed=1)
        proposals = [of_slot_1(propose_with(target, batch))]
        for drafts in (NO_DRAFTS[1], tokens_without_drafts(kind_of(target))[0][2:5]):
            others = [7] * NUM_DRAFTS
            counts = [3, 3, 3] if poisoned else [0, 3, 0]
            batch, emission = run_round(target, batch, [others, drafts, others], counts)
            proposals.append(of_slot_1(batch.proposal))
        assert emission.count[1] == NUM_DRAFTS + 1
        newest = of_slot_1(batch.drafter.hidden)
        return proposals, drafter_rows(batch, 1), newest

    jax.tree.map(np.testing.assert_array_equal, run(True), run(False))


@pytest.mark.parametrize("sampling", SAMPLING)
def test_speculation_emits_what_plain_decoding_emits(dense, sampling):
    # Without the head: the very programs that other tests of plain decoding run.
    config, params = models.DENSE, dataclasses.replace(dense.params, mtp=None)
    plain = models.make_state(config)
    for slot, prompt in enumerate(PROMPTS):
        options = SAMPLING[sampling] | dict(seed=slot)
        plain = models.start(params, config, plain, slot, prompt, **options)
    plain = models.decode(params, config, plain, 24)
    batch, _ = start_all(dense, **SAMPLING[sampling])
    for _ in range(24):
        batch, _ = decode_one_round(dense, batch)
    for slot in range(models.NUM_SLOTS):
        # Each round but the first had drafts.
        assert int(batch.stats.drafted[slot]) == 23 * NUM_DRAFTS
        expected = emitted(plain, slot)
        assert emitted(batch, slot)[: len(expected)] == expected


def test_one_draft_is_the_first_of_more(dense):
    batch, _ = start_all(dense)
    expected = propose_with(dense, batch)
    drafter = make_drafter(dense.config, dense.params, num_drafts=1)
    proposal = propose_with(dense, batch, drafter)
    assert proposal.num_drafts.tolist() == [1] * models.NUM_SLOTS
    np.testing.assert_array_equal(proposal.drafts, expected.drafts[:, :1])
    np.testing.assert_array_equal(proposal.candidates, expected.candidates[:, :1])
    assert_near(proposal.log_probs, expected.log_probs[:, :1])


def start_sampled(target):
    """Slot 0 is greedy, slot 1 takes the 5 best tokens, slot 2 is only cooled."""
    batch, _ = start_all(target)
    sampled = dict(temperature=0.7)
    batch, hidden = start(
        target, batch, 1, PROMPTS[0], top_k=NUM_CANDIDATES, seed=8, **sampled
    )
    batch, _ = start(target, batch, 2, PROMPTS[2], seed=9, **sampled)
    return batch, hidden


def test_sampled_drafts_bring_the_distribution_they_were_drawn_from(dense):
    batch, hidden = start_sampled(dense)
    greedy = propose_with(dense, batch)
    assert greedy.probs is None
    drafter = make_drafter(dense.config, dense.params, draft_sampling="sampled")
    proposal = propose_with(dense, batch, drafter)
    probs = np.asarray(proposal.probs.probs)
    assert probs.shape == (models.NUM_SLOTS, NUM_DRAFTS, models.VOCAB_SIZE)
    np.testing.assert_allclose(np.sum(probs, axis=-1), 1.0, rtol=1e-5)
    # A greedy slot drafts as a greedy drafter does.
    np.testing.assert_array_equal(proposal.drafts[0], greedy.drafts[0])
    np.testing.assert_array_equal(probs[0], np.eye(models.VOCAB_SIZE)[greedy.drafts[0]])
    # The others may draft only what has probability.
    drafted = np.take_along_axis(probs, np.asarray(proposal.drafts)[..., None], axis=-1)
    assert np.all(drafted > 0)
    for column in range(NUM_DRAFTS):
        support = np.flatnonzero(probs[1, column])
        best = np.asarray(proposal.candidates)[1, column]
        assert support.tolist() == sorted(best.tolist())
    assert np.all(probs[2] > 0)
    # The law of slot 1, and its log-probabilities, which nothing warps.
    tokens = np.asarray(batch.tokens)[1, : len(hidden) + 1].tolist()
    drafts = proposal.drafts[1].tolist()
    logits = mtp_oracle.recompute(
        dense.params, dense.config, tokens, hidden, drafts
    ).logits
    log_probs = scipy.special.log_softmax(logits, axis=-1)
    assert_near(proposal.log_probs[1], log_probs[range(NUM_DRAFTS), drafts])
    for column in range(NUM_DRAFTS):
        support = np.flatnonzero(probs[1, column])
        expected = scipy.special.softmax(logits[column, support] / 0.7)
        assert_near(probs[1, column, support], expected)


def test_a_truncated_vocabulary_drafts_its_tokens_alone(dense):
    batch, _ = start_sampled(dense)
    full = make_drafter(dense.config, dense.params, draft_sampling="sampled")
    expected = propose_with(dense, batch, full)
    everything = make_drafter(
        dense.config,
        dense.params,
        draft_sampling="sampled",
        token_ids=reversed(range(models.VOCAB_SIZE)),
    )
    actual = propose_with(dense, batch, everything)
    np.testing.assert_array_equal(actual.drafts, expected.drafts)
    np.testing.assert_array_equal(actual.candidates, expected.candidates)
    assert_near(actual.log_probs, expected.log_probs)
    assert_near(actual.probs.probs, expected.probs.probs)

    # Without the best token of each slot's first draft.
    banned = set(np.asarray(expected.candidates)[:, 0, 0].tolist())
    kept = sorted(set(range(0, models.VOCAB_SIZE, 2)) - banned)
    truncated = make_drafter(
        dense.config, dense.params, draft_sampling="sampled", token_ids=kept
    )
    actual = propose_with(dense, batch, truncated)
    assert set(np.asarray(actual.drafts).ravel().tolist()) <= set(kept)
    assert set(np.asarray(actual.candidates).ravel().tolist()) <= set(kept)
    probs = np.asarray(actual.probs.probs)
    np.testing.assert_allclose(np.sum(probs, axis=-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(np.sum(probs[..., kept], axis=-1), 1.0, rtol=1e-5)
    # Draft 1 of the slot that is only cooled: its law, given the tokens that are left.
    whole = np.asarray(expected.probs.probs)[2, 0, kept]
    assert_near(probs[2, 0, kept], whole / np.sum(whole))


def test_16_bit_targets_keep_their_dtype(dense):
    """And a state has room for what the drafter proposes."""
    bfloat16 = jnp.dtype(jnp.bfloat16)
    params = params_lib.init_params(
        dense.config, rng_key=jax.random.key(0), dtype=bfloat16, with_mtp=True
    )
    drafter = make_drafter(
        dense.config, params, draft_sampling="sampled", token_ids=range(40)
    )
    batch = state_lib.init_state(
        dense.config, models.DECODE, dtype=bfloat16, drafter=drafter
    )
    chunk = jnp.zeros((2, models.CHUNK_LENGTH), jnp.int32)
    counts = jnp.array([3, 0], jnp.int32)
    prefill = functools.partial(steps.prefill, config=dense.config)
    decode_round = functools.partial(steps.decode_round, config=dense.config)
    after, _ = jax.eval_shape(
        prefill, params, batch, counts, chunk, counts, counts > 0, drafter
    )
    after, _ = jax.eval_shape(decode_round, params, after, drafter)
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(after)]
    assert shapes == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch)]
    assert jax.tree.structure(after) == jax.tree.structure(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_drafts=0), "`num_drafts` must be in 1..15, got 0"),
        (dict(num_drafts=16), "`num_drafts` must be in 1..15, got 16"),
        (dict(token_ids=[]), "at least one token"),
        (dict(token_ids=[3, 5, 3]), "distinct, got 3 twice"),
        (dict(token_ids=[3, -1]), "0..127 .the vocabulary., got -1"),
        (dict(token_ids=[3, 128]), "0..127 .the vocabulary., got 128"),
        (dict(num_candidates=-1), "0..128, the tokens"),
        (dict(num_candidates=3, token_ids=[1, 2]), "0..2, the tokens"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(dense, options, message):
    with pytest.raises(ValueError, match=message):
        make_drafter(dense.config, dense.params, **options)


def test_a_target_without_its_head_is_refused(dense):
    headless = dataclasses.replace(dense.params, mtp=None)
    with pytest.raises(ValueError, match="load the checkpoint with `with_mtp=True`"):
        make_drafter(dense.config, headless)


def test_a_state_with_less_room_is_refused(dense):
    drafter = make_drafter(dense.config, dense.params, num_drafts=NUM_DRAFTS + 1)
    with pytest.raises(ValueError, match="`max_drafts` must be at least the drafter's"):
        models.make_state(dense.config, drafter)

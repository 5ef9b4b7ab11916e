"""Laws of the DFlash drafter: an oracle's drafts, context that never holds a block."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch

import tiny_models as models
from drafters import dflash_oracle
from metrale_jax import checkpoint, steps
from metrale_jax import state as state_lib
from metrale_jax.drafters import dflash, dflash_config, dflash_params, protocol

TARGET = models.DENSE
NUM_DRAFTS = models.MAX_DRAFTS
NUM_SLOTS = models.NUM_SLOTS
VOCAB_SIZE = models.VOCAB_SIZE
TAPS = (0, 2)
WINDOW = 8
MASK = 127
WIDTH = TARGET.hidden_size * len(TAPS)
# Float32 against float64, on logits of order 1 to 10.
ABSOLUTE_TOLERANCE = 1e-4
# The same sums over 1, 16 or 48 rows at once, on keys and values of order 1.
CONTEXT_TOLERANCE = 1e-5

FULL, SLIDING = "full_attention", "sliding_attention"
RAW = dict(
    architectures=["DFlashDraftModel"],
    model_type="qwen3",
    vocab_size=VOCAB_SIZE,
    hidden_size=TARGET.hidden_size,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=256,
    num_target_layers=TARGET.num_layers,
    layer_types=[FULL, FULL],
    dflash_config=dict(block_size=6, mask_token_id=MASK, target_layer_ids=list(TAPS)),
)
VARIANTS = {
    "full bidirectional": {},
    "sliding causal": dict(layer_types=[SLIDING] * 2, sliding_window=WINDOW),
    # The window is less than the block: its edge lies inside of it, on both sides.
    "sliding symmetric": dict(
        layer_types=[SLIDING] * 2, sliding_window=3, is_causal=False
    ),
    "mixed": dict(
        layer_types=[SLIDING, FULL],
        sliding_window=WINDOW,
        input_embedding_scale=3.0,
        output_multiplier=2.0,
        final_logit_softcapping=5.0,
    ),
}
# Everything of its own, and a head for two tokens only: a target that may pick only
# these accepts many of a random drafter's drafts.
NUM_OWN_TOKENS = 2
OWN_TOKENS = [i * VOCAB_SIZE // NUM_OWN_TOKENS for i in range(NUM_OWN_TOKENS)]
MAX_POSITION = 32
OWN = dict(
    draft_vocab_size=NUM_OWN_TOKENS,
    max_position_embeddings=MAX_POSITION,
    layer_types=[SLIDING, FULL],
    sliding_window=WINDOW,
)


@functools.cache
def target_params():
    return models.make_params(TARGET)


def make_drafter(seed=1, own=False, raw=(), **options):
    config = dflash_config.parse_dflash_config(RAW | dict(raw))
    if own:
        config = dataclasses.replace(
            config, has_embedding=True, has_head=True, has_mask_embedding=True
        )
    params = random_params(shape_of(config), seed)
    return dflash.DFlashDrafter(params, config, NUM_DRAFTS, **options)


def shape_of(config):
    """The config with what changes no shape set to one value: compiled programs that
    do not read it serve all."""
    return dataclasses.replace(
        config,
        layers=(FULL,) * config.num_layers,
        window=None,
        is_causal=None,
        max_position=256,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
    )


@functools.cache
def random_params(config, seed):
    return dflash_params.init_dflash_params(config, rng_key=jax.random.key(seed))


def make_own_drafter():
    return make_drafter(own=True, raw=OWN, draft_sampling="sampled", num_candidates=2)


def append(drafter, *arguments, as_chunk):
    """Appends rows [B, T, taps * M], by a round's path or by a prompt's.

    What a layer may see, and how logits are made, is nothing to the context.
    """
    drafter = drafter.replace(config=shape_of(drafter.config))
    return _append(drafter, *arguments, as_chunk=as_chunk)


@functools.partial(jax.jit, static_argnames="as_chunk")
def _append(drafter, params, state, streams, start, count, as_chunk):
    taps = tuple(jnp.split(streams, len(TAPS), axis=-1))
    unused = jnp.zeros((*streams.shape[:2], TARGET.hidden_size), jnp.float32)
    tokens = jnp.zeros(streams.shape[:2], jnp.int32)
    options = dict(config=TARGET, implementation=None)
    if as_chunk:
        chunk = protocol.CommittedChunk(
            start=start,
            tokens=tokens,
            num_tokens=count,
            is_last=count > 0,
            first_token=count,
            previous_hidden=unused[:, 0],
            hidden=unused,
            taps=taps,
        )
        return drafter.prefill(params, state, chunk, **options)
    rows = protocol.CommittedRows(
        start=start,
        count=count,
        next_tokens=tokens,
        hidden=unused,
        taps=taps,
        num_drafts=count,
        num_accepted=count,
    )
    return drafter.commit(params, state, rows, **options)


@jax.jit
def propose(drafter, params, state):
    return drafter.propose(params, state, config=TARGET, implementation=None)


def empty_state(drafter):
    """As `make_state` gives it, without the time that it takes."""
    key = drafter.config, drafter.draft_sampling, drafter.num_candidates
    if key not in _EMPTY_STATES:
        _EMPTY_STATES[key] = models.make_state(TARGET, drafter)
    return _EMPTY_STATES[key]


_EMPTY_STATES = {}


def make_context(drafter, streams, lengths, last_tokens=(3, 4, 5), width=48):
    """A state whose slots hold the first `lengths` of streams [B, S, taps * M]."""
    state = empty_state(drafter)
    pages = np.arange(models.DECODE.num_pages, dtype=np.int32)
    # Pages of a slot do not follow one another.
    pages = np.random.default_rng(5).permutation(pages).reshape(NUM_SLOTS, -1)
    state = state.replace(
        page_table=jnp.asarray(pages),
        last_token=jnp.array(last_tokens, jnp.int32),
        length=jnp.zeros(NUM_SLOTS, jnp.int32),
    )
    return extend(drafter, state, streams, lengths, width)


def extend(drafter, state, streams, lengths, width, as_chunk=True):
    """Appends from each slot's length up to `lengths`, in pieces of at most `width`."""
    lengths = np.array(lengths)
    while (np.asarray(state.length) < lengths).any():
        start = np.asarray(state.length)
        count = np.minimum(lengths - start, width)
        piece = np.full((NUM_SLOTS, width, WIDTH), np.nan, np.float32)
        for slot in range(NUM_SLOTS):
            rows = streams[slot, start[slot] : start[slot] + count[slot]]
            piece[slot, : count[slot]] = rows
        caches = append(
            drafter,
            target_params(),
            state,
            jnp.asarray(piece),
            jnp.asarray(start, jnp.int32),
            jnp.asarray(count, jnp.int32),
            as_chunk=as_chunk,
        )
        state = state.replace(
            drafter=caches, length=jnp.asarray(start + count, jnp.int32)
        )
    return state


def random_streams(seed=0):
    shape = (NUM_SLOTS, models.MAX_LENGTH, WIDTH)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def context_rows(state, slot):
    """The keys and values that a slot holds, of every layer, in order."""
    length = int(state.length[slot])
    pages = np.asarray(state.page_table[slot])
    return [
        np.asarray(array)[pages].reshape(-1, *array.shape[2:])[:length]
        for array in jax.tree.leaves(state.drafter)
    ]


def stored_tensors(drafter, folder):
    checkpoint.save_dflash(folder, drafter.config, drafter.params)
    return safetensors.torch.load_file(folder / "model.safetensors")


def oracle_logits(raw, tensors, streams, last_token, params=None):
    params = target_params() if params is None else params
    logits = dflash_oracle.draft_logits(
        raw,
        tensors,
        torch.from_numpy(streams),
        last_token,
        NUM_DRAFTS,
        embedding=torch.from_numpy(np.array(params.embedding)),
        head=torch.from_numpy(np.array(params.output_head)),
    )
    return logits.numpy()


def assert_agrees(proposal, slot, logits):
    """A greedy proposal is what logits [J, V] say."""
    log_probs = _log_softmax(logits)
    order = np.argsort(-logits, axis=-1, kind="stable")
    # What rounding might swap would say nothing about the code.
    best = np.take_along_axis(logits, order[:, :2], axis=-1)
    assert (best[:, 0] - best[:, 1] > 2 * ABSOLUTE_TOLERANCE).all(), best
    np.testing.assert_array_equal(proposal.drafts[slot], order[:, 0])
    np.testing.assert_allclose(
        proposal.log_probs[slot],
        np.take_along_axis(log_probs, order[:, :1], axis=-1)[:, 0],
        rtol=0,
        atol=ABSOLUTE_TOLERANCE,
    )
    if proposal.candidates is not None:
        num_candidates = proposal.candidates.shape[-1]
        assert proposal.candidates[slot].tolist() == order[:, :num_candidates].tolist()


# Lengths around the window of 8, and none at all. A slot's last token may be the mask
# id itself: a token like any other.
@pytest.mark.parametrize("lengths", [(4, 8, 9), (40, 0, 7), (1, 2, 3)])
@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_those_of_the_oracle(tmp_path, name, lengths):
    raw = RAW | VARIANTS[name]
    drafter = make_drafter(raw=raw)
    tensors = stored_tensors(drafter, tmp_path)
    streams, last_tokens = random_streams(), (3, MASK, 0)
    state = make_context(drafter, streams, lengths, last_tokens)
    proposal = propose(drafter, target_params(), state)
    assert proposal.num_drafts.tolist() == [NUM_DRAFTS] * NUM_SLOTS
    for slot, length in enumerate(lengths):
        logits = oracle_logits(raw, tensors, streams[slot, :length], last_tokens[slot])
        assert_agrees(proposal, slot, logits)


def test_window_edges_cell_by_cell_outside_of_the_block():
    """A row sees the position at k exactly if q - k < window."""
    window, length = 4, 11
    raw = dict(num_hidden_layers=1, layer_types=[SLIDING], sliding_window=window)
    drafter = make_drafter(raw=raw)
    streams = random_streams()
    state = make_context(drafter, streams, [length] * NUM_SLOTS)
    expected = np.asarray(propose(drafter, target_params(), state).log_probs)
    for position in range(length):
        other = streams.copy()
        other[:, position] += 1.0
        state = make_context(drafter, other, [length] * NUM_SLOTS)
        actual = np.asarray(propose(drafter, target_params(), state).log_probs)
        # Row j of the block is at length + j; row 0 is no draft.
        rows = length + 1 + np.arange(NUM_DRAFTS)
        sees = np.broadcast_to(rows - position < window, actual.shape)
        np.testing.assert_array_equal(actual != expected, sees, err_msg=str(position))


def test_what_lies_beyond_the_window_counts_in_full_layers_only():
    length = 40
    lengths = [length] * NUM_SLOTS
    streams = random_streams()
    other = streams.copy()
    # Two sliding layers: row 0, from which the second layer reads, sees 7 back.
    other[:, : length - WINDOW + 1] += 1.0
    for name, counts in {"sliding causal": False, "mixed": True}.items():
        drafter = make_drafter(raw=VARIANTS[name])
        first, second = (
            propose(drafter, target_params(), make_context(drafter, rows, lengths))
            for rows in (streams, other)
        )
        differs = np.asarray(first.log_probs) != np.asarray(second.log_probs)
        assert differs.all() if counts else not differs.any(), name


def test_context_in_pieces_is_context_in_one():
    drafter = make_drafter(raw=VARIANTS["mixed"])
    streams, lengths = random_streams(), (21, 40, 0)
    whole = make_context(drafter, streams, lengths)
    chunks = make_context(drafter, streams, lengths, width=16)
    rounds = make_context(drafter, streams, (3, 30, 0))
    rounds = extend(drafter, rounds, streams, lengths, NUM_DRAFTS + 1, as_chunk=False)
    expected = propose(drafter, target_params(), whole)
    for state in (chunks, rounds):
        for slot in range(NUM_SLOTS):
            for actual, rows in zip(
                context_rows(state, slot), context_rows(whole, slot), strict=True
            ):
                np.testing.assert_allclose(actual, rows, rtol=0, atol=CONTEXT_TOLERANCE)
        proposal = propose(drafter, target_params(), state)
        np.testing.assert_array_equal(proposal.drafts, expected.drafts)
        np.testing.assert_allclose(
            proposal.log_probs, expected.log_probs, rtol=0, atol=ABSOLUTE_TOLERANCE
        )


def test_rows_that_are_not_committed_leave_no_bit():
    """Blocks rejected earlier, and what free pages hold, are nowhere to be seen."""
    drafter = make_drafter(raw=VARIANTS["mixed"])
    streams, lengths = random_streams(), (9, 16, 24)

    def run(garbage):
        state = make_context(drafter, streams, lengths)
        if garbage is not None:
            state = state.replace(
                drafter=jax.tree.map(
                    functools.partial(_fill_beyond, state, garbage), state.drafter
                )
            )
        for count in ((1, 0, 2), (1, 3, 1)):
            start = np.asarray(state.length)
            rows = np.full((NUM_SLOTS, NUM_DRAFTS + 1, WIDTH), garbage or 0, np.float32)
            for slot in range(NUM_SLOTS):
                end = start[slot] + count[slot]
                rows[slot, : count[slot]] = streams[slot, start[slot] : end]
            caches = append(
                drafter,
                target_params(),
                state,
                jnp.asarray(rows),
                state.length,
                jnp.array(count, jnp.int32),
                as_chunk=False,
            )
            state = state.replace(
                drafter=caches, length=state.length + jnp.array(count, jnp.int32)
            )
        return state, propose(drafter, target_params(), state)

    expected_state, expected = run(None)
    for garbage in (7.0, np.nan):
        state, proposal = run(garbage)
        jax.tree.map(np.testing.assert_array_equal, proposal, expected)
        # What is not committed was not written either.
        for array in jax.tree.leaves(state.drafter):
            np.testing.assert_array_equal(array, _fill_beyond(state, garbage, array))
        for slot in range(NUM_SLOTS):
            for actual, rows in zip(
                context_rows(state, slot),
                context_rows(expected_state, slot),
                strict=True,
            ):
                np.testing.assert_array_equal(actual, rows)


def _fill_beyond(state, value, array):
    """Fills what no slot has committed."""
    filled = np.full(array.shape, value, array.dtype)
    page_size = array.shape[1]
    for slot, length in enumerate(np.asarray(state.length)):
        for position in range(length):
            page = int(state.page_table[slot, position // page_size])
            at = (page, position % page_size)
            filled[at] = np.asarray(array)[at]
    return jnp.asarray(filled)


def test_random_parameters_are_what_the_description_says():
    drafter = make_own_drafter()
    specs = dflash_params.describe_dflash_params(drafter.config, dtype=jnp.float32)
    assert jax.tree.structure(specs) == jax.tree.structure(drafter.params)
    for (path, spec), leaf in zip(
        jax.tree.leaves_with_path(specs), jax.tree.leaves(drafter.params), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype)
        if jax.tree_util.keystr(path).endswith("norm"):
            # Plain norms multiply: around 0 they would put out the signal.
            assert 0.8 < leaf.mean() < 1.2
    tokens = np.arange(NUM_OWN_TOKENS) + np.asarray(drafter.params.d2t)
    assert tokens.tolist() == OWN_TOKENS


def test_proposing_stores_nothing_and_repeats():
    drafter = make_drafter(raw=VARIANTS["mixed"])
    state = make_context(drafter, random_streams(), (9, 16, 24))
    first, second = (propose(drafter, target_params(), state) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_drafts_depend_on_context_last_token_and_position():
    drafter = make_drafter(raw=VARIANTS["mixed"])
    streams = random_streams()
    # The same nine rows, of which one slot holds eight, and one under another token.
    streams[1:] = streams[:1]

    def log_probs(streams, lengths=(9, 8, 9), last_tokens=(3, 3, 4)):
        state = make_context(drafter, streams, lengths, last_tokens)
        return np.asarray(propose(drafter, target_params(), state).log_probs)

    base = log_probs(streams)
    assert (base[0] != base[1]).all()
    assert (base[0] != base[2]).all()
    assert (base != log_probs(random_streams(seed=1))).all()


def test_every_tensor_counts():
    drafter = make_own_drafter()
    streams, lengths = random_streams(), (4, 9, 20)

    def run(params):
        other = drafter.replace(params=params)
        state = make_context(other, streams, lengths, last_tokens=(3, 99, 0))
        return propose(other, target_params(), state)

    expected = run(drafter.params)
    places, treedef = jax.tree.flatten_with_path(drafter.params)
    leaves = [leaf for _, leaf in places]
    for index, (path, leaf) in enumerate(places):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            changed = leaf + 1
        else:
            noise = np.random.default_rng(index).standard_normal(leaf.shape)
            changed = leaf + jnp.asarray(noise, leaf.dtype)
        others = [*leaves[:index], changed, *leaves[index + 1 :]]
        actual = run(jax.tree.unflatten(treedef, others))
        name = jax.tree_util.keystr(path)
        if name == ".d2t":
            np.testing.assert_array_equal(actual.drafts, expected.drafts + 1)
        else:
            differs = np.asarray(actual.log_probs) != np.asarray(expected.log_probs)
            # A perturbed embedding may leave a row of mask embeddings alone at first.
            assert differs.any(axis=1).all(), name


def test_own_head_of_a_part_of_the_vocabulary(tmp_path):
    drafter = make_own_drafter()
    tensors = stored_tensors(drafter, tmp_path)
    streams, lengths, last_tokens = random_streams(), (4, 9, 20), (3, 99, 0)
    state = make_context(drafter, streams, lengths, last_tokens)
    proposal = propose(drafter, target_params(), state)
    assert set(np.asarray(proposal.drafts).ravel().tolist()) <= set(OWN_TOKENS)
    for slot, length in enumerate(lengths):
        logits = oracle_logits(
            RAW | OWN, tensors, streams[slot, :length], last_tokens[slot]
        )
        assert_agrees(proposal, slot, logits)
    # A greedy slot's drafts are certain.
    ids = np.asarray(proposal.drafts)
    np.testing.assert_array_equal(
        proposal.probs.probs, np.eye(VOCAB_SIZE, dtype=np.float32)[ids]
    )
    # A sampled slot's drafts follow the warped distribution; their log-probabilities
    # are those before.
    temperature = 0.5
    sampling = dataclasses.replace(
        state.sampling, temperature=jnp.full(NUM_SLOTS, temperature, jnp.float32)
    )
    sampled = propose(drafter, target_params(), state.replace(sampling=sampling))
    drafts = np.asarray(sampled.drafts)
    assert set(drafts.ravel().tolist()) <= set(OWN_TOKENS)
    for slot, length in enumerate(lengths):
        logits = oracle_logits(
            RAW | OWN, tensors, streams[slot, :length], last_tokens[slot]
        )
        log_probs = _log_softmax(logits)
        np.testing.assert_allclose(
            sampled.log_probs[slot],
            np.take_along_axis(log_probs, drafts[slot][:, None], axis=-1)[:, 0],
            rtol=0,
            atol=ABSOLUTE_TOLERANCE,
        )
        np.testing.assert_allclose(
            sampled.probs.probs[slot],
            np.exp(_log_softmax(logits / temperature)),
            rtol=0,
            atol=ABSOLUTE_TOLERANCE,
        )


def _log_softmax(logits):
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def test_own_head_with_more_rows_than_the_target_has_tokens(tmp_path):
    """The largest logit of all is no token's: it is never proposed."""
    raw = RAW | dict(vocab_size=VOCAB_SIZE + 32)
    drafter = make_drafter(own=True, raw=raw)
    head = drafter.params.lm_head
    padded = drafter.params.replace(lm_head=head.at[VOCAB_SIZE:].set(100.0 * head[:32]))
    drafter = drafter.replace(params=padded)
    tensors = stored_tensors(drafter, tmp_path)
    streams, lengths = random_streams(), (4, 9, 20)
    state = make_context(drafter, streams, lengths)
    proposal = propose(drafter, target_params(), state)
    for slot, length in enumerate(lengths):
        logits = oracle_logits(raw, tensors, streams[slot, :length], slot + 3)
        assert_agrees(proposal, slot, logits)


def test_a_borrowed_head_is_the_tied_embedding(tmp_path):
    """Whatever vocabulary the drafter's own config claims."""
    raw = RAW | dict(vocab_size=VOCAB_SIZE + 32)
    drafter = make_drafter(raw=raw)
    tensors = stored_tensors(drafter, tmp_path)
    tied = dataclasses.replace(target_params(), lm_head=None)
    streams, lengths = random_streams(), (4, 9, 20)
    state = make_context(drafter, streams, lengths)
    proposal = propose(drafter, tied, state)
    for slot, length in enumerate(lengths):
        rows = streams[slot, :length]
        assert_agrees(proposal, slot, oracle_logits(raw, tensors, rows, slot + 3, tied))


def test_no_drafts_past_the_drafters_last_position():
    drafter = make_own_drafter()
    last = MAX_POSITION - NUM_DRAFTS - 1
    state = make_context(drafter, random_streams(), (last, last + 1, 4))
    proposal = propose(drafter, target_params(), state)
    assert proposal.num_drafts.tolist() == [NUM_DRAFTS, 0, NUM_DRAFTS]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_dtypes_of_target_and_drafter_may_differ(dtype):
    dtype = jnp.dtype(dtype)
    other = jnp.dtype(jnp.float32 if dtype == jnp.bfloat16 else jnp.bfloat16)
    drafter = make_own_drafter()
    drafter = jax.eval_shape(
        lambda: drafter.replace(
            params=dflash_params.init_dflash_params(
                drafter.config, rng_key=jax.random.key(0), dtype=other
            )
        )
    )
    params = jax.eval_shape(
        lambda: models.params_lib.init_params(
            TARGET, rng_key=jax.random.key(0), dtype=dtype
        )
    )
    state = state_lib.describe_state(
        TARGET, models.DECODE, dtype=dtype, drafter=drafter
    )
    streams = jax.ShapeDtypeStruct((NUM_SLOTS, 4, WIDTH), dtype)
    counts = jax.ShapeDtypeStruct((NUM_SLOTS,), jnp.int32)
    caches = jax.eval_shape(
        functools.partial(append, as_chunk=False),
        drafter,
        params,
        state,
        streams,
        counts,
        counts,
    )
    assert jax.tree.all(jax.tree.map(lambda leaf: leaf.dtype == dtype, caches))
    proposal = jax.eval_shape(propose, drafter, params, state)
    assert jax.tree.structure(proposal) == jax.tree.structure(state.proposal)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_drafts=6), "`num_drafts` must be in 1..5"),
        (dict(num_drafts=0), "`num_drafts` must be in 1..15"),
        (dict(draft_sampling="beam"), "greedy or sampled"),
        (dict(num_candidates=VOCAB_SIZE + 1), "`num_candidates` must be in 0..128"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        make_drafter().replace(**options)


def test_a_drafter_of_another_target_is_refused():
    other = dflash_config.parse_dflash_config(RAW | dict(hidden_size=32))
    drafter = make_drafter().replace(config=other)
    with pytest.raises(ValueError, match="`hidden_size` of the drafter"):
        models.make_state(TARGET, drafter)


# From here on with a target: one drafter, so that its steps compile once.

PROMPTS = (
    [5, 17, 3, 99, 21, 8, 64, MASK, 2, 2, 9, 30, 31, 32, 33, 1, 7, 12],
    [2],
    [101, 7, 7, 7],
)
SAMPLING = (
    dict(),
    dict(temperature=1.0),
    dict(temperature=0.8, top_k=3, top_p=0.9),
)
NUM_ROUNDS = 6


@pytest.fixture(scope="module")
def own():
    return make_own_drafter()


def start(drafter, slots, chunks=16, prompts=PROMPTS):
    """A batch whose slots have run their prompts, and the taps of each prompt."""
    batch = models.make_state(TARGET, drafter)
    streams = {}
    for slot in slots:
        request = models.make_request(
            TARGET, slot, seed=slot, allowed_token_ids=OWN_TOKENS, **SAMPLING[slot]
        )
        batch = steps.insert(batch, jnp.int32(slot), request)
        parts = []
        prompt = prompts[slot]
        for begin in range(0, len(prompt), chunks):
            piece = prompt[begin : begin + chunks]
            padded = [*piece, *[0] * (models.CHUNK_LENGTH - len(piece))]
            batch, output = steps.prefill(
                target_params(),
                batch,
                jnp.array([slot], jnp.int32),
                jnp.array([padded], jnp.int32),
                jnp.array([len(piece)], jnp.int32),
                jnp.array([begin + chunks >= len(prompt)]),
                drafter,
                config=TARGET,
                taps=TAPS,
            )
            taps = [np.asarray(tap)[0, : len(piece)] for tap in output.taps]
            parts.append(np.concatenate(taps, axis=-1))
        streams[slot] = np.concatenate(parts)
    return batch, streams


def decode(drafter, batch):
    batch, _ = steps.decode_rounds(
        target_params(), batch, drafter, num_rounds=NUM_ROUNDS, config=TARGET
    )
    return batch


def output_of(batch, slot):
    return models.output_tokens(batch, slot, len(PROMPTS[slot]))


@functools.cache
def plain_tokens():
    """What plain decoding emits in each slot, to the end."""
    batch = models.make_state(TARGET)
    for slot, options in enumerate(SAMPLING):
        batch = models.start(
            target_params(),
            TARGET,
            batch,
            slot,
            PROMPTS[slot],
            seed=slot,
            allowed_token_ids=OWN_TOKENS,
            **options,
        )
    batch = models.decode(target_params(), TARGET, batch, models.MAX_LENGTH)
    assert not batch.active.any()
    return [output_of(batch, slot) for slot in range(NUM_SLOTS)]


def test_a_batch_emits_what_plain_decoding_emits(own):
    """To the end of every slot, past the drafter's last position."""
    batch, _ = start(own, range(NUM_SLOTS))
    beside = False
    while bool(batch.active.any()):
        batch = decode(own, batch)
        length, num_drafts = np.asarray(batch.length), batch.proposal.num_drafts
        past = length + NUM_DRAFTS + 1 > MAX_POSITION
        assert not np.asarray(num_drafts)[past].any()
        beside |= bool(past.any() and np.asarray(num_drafts)[~past].any())
    # A slot past it went on beside one that still had drafts.
    assert beside
    for slot, tokens in enumerate(plain_tokens()):
        assert output_of(batch, slot) == tokens
        assert len(tokens) == models.MAX_LENGTH - len(PROMPTS[slot])
    drafted, accepted = int(batch.stats.drafted.sum()), int(batch.stats.accepted.sum())
    assert 0 < accepted < drafted
    # Rejections and whole blocks both occur.
    outcomes = np.asarray(batch.stats.outcomes).sum(axis=0)
    assert outcomes[0] and outcomes[-1]


def test_a_slot_drafts_the_same_alone_and_in_a_batch(own):
    together = decode(own, start(own, range(NUM_SLOTS))[0])
    for slot in range(NUM_SLOTS):
        alone = decode(own, start(own, [slot])[0])
        assert output_of(alone, slot) == output_of(together, slot)
        for name in ("drafts", "log_probs", "num_drafts"):
            np.testing.assert_array_equal(
                getattr(alone.proposal, name)[slot],
                getattr(together.proposal, name)[slot],
                err_msg=name,
            )


def test_drafts_after_a_prompt_are_those_of_the_oracle(own, tmp_path):
    """The taps of verify and prefill are the ones that the drafter was made for."""
    tensors = stored_tensors(own, tmp_path)
    batch, streams = start(own, [0])
    last_token = int(batch.last_token[0])
    proposal = propose(own, target_params(), batch)
    logits = oracle_logits(RAW | OWN, tensors, streams[0], last_token)
    assert_agrees(proposal, 0, logits)


def test_context_of_rounds_is_the_context_of_a_prompt(own):
    """Any split of a prompt, and decoding it, leave the same keys and values."""
    batch, _ = start(own, range(NUM_SLOTS))
    split, _ = start(own, range(NUM_SLOTS), chunks=5)
    for slot in range(NUM_SLOTS):
        for actual, rows in zip(
            context_rows(split, slot), context_rows(batch, slot), strict=True
        ):
            np.testing.assert_allclose(actual, rows, rtol=0, atol=5e-5)
    batch = decode(own, batch)
    tokens = {
        slot: [*PROMPTS[slot], *output_of(batch, slot)][:-1]
        for slot in range(NUM_SLOTS)
    }
    prompted, _ = start(own, range(NUM_SLOTS), prompts=tokens)
    for slot in range(NUM_SLOTS):
        for actual, rows in zip(
            context_rows(batch, slot), context_rows(prompted, slot), strict=True
        ):
            np.testing.assert_allclose(actual, rows, rtol=0, atol=5e-5)


def test_a_rejected_block_leaves_no_bit(own):
    """Two blocks that fail at their first draft lead to one and the same state."""

    def run(shift):
        batch, _ = start(own, range(NUM_SLOTS))
        # No target may pick these.
        drafts = jnp.full((NUM_SLOTS, NUM_DRAFTS), 1 + shift, jnp.int32)
        offered = jnp.full(NUM_SLOTS, NUM_DRAFTS, jnp.int32)
        proposal = batch.proposal.replace(drafts=drafts, num_drafts=offered)
        return decode(own, batch.replace(proposal=proposal))

    first, second = run(0), run(40)
    for slot in range(NUM_SLOTS):
        assert output_of(first, slot) == output_of(second, slot)
        for one, other in zip(
            context_rows(first, slot), context_rows(second, slot), strict=True
        ):
            np.testing.assert_array_equal(one, other)
    jax.tree.map(np.testing.assert_array_equal, first.proposal, second.proposal)

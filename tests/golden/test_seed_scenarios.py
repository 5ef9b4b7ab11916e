"""The rounds of the engine that this project re-implements, replayed tick by tick.

Figures are those of its golden traces. Where this library differs on purpose, the test
says how and asserts its own value: a sequence that ends inside accepted drafts ends
where plain decoding ends (the source accepts drafts beyond the end token, counts them,
and leaves its length past it), and n-gram search includes `last_token`.
"""

import jax.numpy as jnp
import pytest

from golden import toy_target as toy
from metrale_jax import state, statistics
from metrale_jax.drafters import confidence, ngram


def test_verify_k4():
    script = toy.run_of(14, 10)
    batch = toy.ToyBatch([toy.Script(toy.prompt_of(1, 5), tuple(script), 4)], 3)
    first = batch.tick()
    assert (first.inputs, first.emitted, first.length) == ([[10]], [[11]], [6])
    expected = [
        # inputs, picks, accepted, length after
        ([11, 12, 13, 15], [12, 13, 14, 1], 2, 9),
        ([14, 15, 16, 17], [15, 16, 17, 18], 3, 13),
        ([18, 19, 20, 21], [19, 20, 21, 22], 3, 17),
        # The source accepts all three and leaves this round at length 21, two past the
        # end token's.
        ([22, 23, 63, 63], [23, 63, 63, 63], 2, 19),
    ]
    for inputs, picks, num_accepted, length in expected:
        drafts = batch.propose()
        tick = batch.tick()
        assert drafts == [inputs[1:]]
        assert tick.inputs == [inputs]
        assert tick.picks == [picks]
        assert tick.num_accepted == [num_accepted]
        assert tick.length == [length]
    assert batch.output(0) == script
    assert int(batch.state.finish_reason[0]) == state.FINISHED_END_TOKEN
    summary = statistics.summarize(batch.state.stats)
    # The source counts 11, one of them beyond the end token.
    assert summary.accepted == 10
    assert summary.outcomes == (0, 0, 2, 2)
    # Rounds of 3, 3, 3 and 2 drafts that could be used; the wrong one was a third.
    assert summary.unconditional == (1.0, 1.0, 2 / 3)
    assert summary.conditional == (1.0, 1.0, 2 / 3)
    assert summary.cumulative == (1.0, 1.0, 2 / 4)
    # The first token came with the prompt.
    assert summary.num_tokens == len(script) - 1


@pytest.mark.parametrize(
    ("num_drafts", "num_accepted", "source_accepted", "num_used"),
    [
        # The last round ends inside its drafts; the source counts all of them.
        (2, [2, 2, 0, 2, 0, 2], 8, 8),
        (1, [1, 0, 1, 1, 1, 1, 1], 6, 6),
    ],
)
def test_verify_k3_and_k2(num_drafts, num_accepted, source_accepted, num_used):
    script = toy.run_of(14, 10)
    sequence = toy.Script(toy.prompt_of(1, 5), tuple(script), 4)
    batch = toy.ToyBatch([sequence], num_drafts)
    batch.tick()
    counts, emitted = [], []
    while batch.state.active[0]:
        batch.propose()
        tick = batch.tick()
        counts += tick.num_accepted
        emitted += tick.emitted
    assert counts == num_accepted
    assert sum(counts) == source_accepted
    assert batch.output(0) == script
    assert statistics.summarize(batch.state.stats).accepted == num_used
    # Every round but the last emits its accepted drafts and the bonus token.
    assert [len(tokens) for tokens in emitted[:-1]] == [n + 1 for n in counts[:-1]]


def test_batched_verify_k4_with_pruned_drafts():
    scripts = [toy.run_of(12, base) for base in (10, 20, 30)]
    batch = toy.ToyBatch(
        [
            toy.Script(toy.prompt_of(1, 5), tuple(scripts[0])),
            toy.Script(toy.prompt_of(2, 6), tuple(scripts[1]), 3),
            toy.Script(toy.prompt_of(3, 7), tuple(scripts[2])),
        ],
        3,
    )
    limits = confidence.DraftLimits(prune_ratio=0.75)
    assert batch.tick().emitted == [[11], [21], [31]]
    rows = [[len(drafts) + 1 for drafts in batch.propose(limits=limits)]]
    tick = batch.tick()
    assert rows == [[4, 4, 3]]
    assert tick.picks == [[12, 13, 14, 15], [22, 23, 1, 1], [32, 33, 34]]
    assert tick.length == [10, 9, 11]
    kept = [[n + 1 for n in tick.num_accepted]]
    while batch.state.active.any():
        served = batch.state.active.tolist()
        drafts = batch.propose(limits=limits)
        rows.append([len(d) + 1 for d, s in zip(drafts, served, strict=True) if s])
        tick = batch.tick()
        kept.append(
            [n + 1 for n, s in zip(tick.num_accepted, served, strict=True) if s]
        )
    # What each round's verify keeps, before a sequence's end cuts it.
    assert kept == [[4, 2, 3], [4, 3, 3], [4, 3, 3], [3, 3]]
    assert rows[-1] == [4, 3]
    for slot, script in enumerate(scripts):
        assert batch.output(slot) == script


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_dflash(num_sequences):
    scripts = [toy.run_of(16, 10 * (n + 1)) for n in range(num_sequences)]
    batch = toy.ToyBatch(
        [
            toy.Script(toy.prompt_of(n + 1, 5), tuple(script), 5)
            for n, script in enumerate(scripts)
        ],
        5,
    )
    # The source drafts five before its first round and judges three of them.
    assert batch.propose(max_num_drafts=3)[0] == [11, 12, 13]
    assert batch.tick().num_accepted == [3] * num_sequences
    expected = [
        ([16, 16, 17, 18, 19], 0, 10),
        ([16, 17, 18, 19, 21], 4, 15),
        ([21, 22, 23, 24, 26], 4, 20),
        # The source accepts four and stays at length 25, four past the end token's.
        ([63, 63, 63, 63, 1], 1, 21),
    ]
    for drafts, num_accepted, length in expected:
        assert batch.propose()[0] == drafts
        tick = batch.tick()
        assert tick.num_accepted == [num_accepted] * num_sequences
        assert tick.length == [length] * num_sequences
    for slot, script in enumerate(scripts):
        assert batch.output(slot) == script
    # The source counts 15 per sequence, three of them beyond the end token.
    assert statistics.summarize(batch.state.stats).accepted == 12 * num_sequences


def test_ngram_search_includes_the_last_token():
    script = (8, 2, 3, 4, 9, 6, 7, 8, 2, 63)
    sequence = toy.Script(toy.prompt_of(1, 15), script)
    batch = toy.ToyBatch([sequence], 1)
    drafter = ngram.NGramDrafter(num_drafts=1)
    verified = []
    while batch.state.active[0]:
        guess = drafter.propose(
            toy.PARAMS, batch.state, config=toy.CONFIG, implementation=None
        )
        pending = batch.state.proposal.replace(
            drafts=guess.drafts, num_drafts=guess.num_drafts
        )
        batch.state = batch.state.replace(proposal=pending)
        verified += batch.tick().inputs
    assert batch.output(0) == list(script)
    # The source searches without the newest token, so that it guesses that token again:
    # it verifies [3, 3], [4, 4] and [8, 8]. Here a draft follows its last token.
    pairs = [tuple(rows) for rows in verified if len(rows) == 2]
    assert pairs, "the text repeats itself, so something is found"
    assert not [pair for pair in pairs if pair[0] == pair[1]]
    text = [*sequence.prompt, *script]
    for last_token, draft in pairs:
        assert (last_token, draft) in zip(text, text[1:], strict=False)
    assert statistics.summarize(batch.state.stats).accepted > 0


def test_self_speculation_emits_the_script():
    """The source decodes one token plainly before each verify; here a round is one."""
    script = toy.run_of(10, 10)
    batch = toy.ToyBatch([toy.Script(toy.prompt_of(1, 5), tuple(script))], 2)
    num_rounds = 0
    while batch.state.active[0]:
        batch.propose()
        batch.tick()
        num_rounds += 1
    assert batch.output(0) == script
    # Ten tokens after the first, three a round.
    assert num_rounds == 4


def test_a_cancelled_sequence_leaves_its_neighbour_alone():
    scripts = [toy.run_of(20, 10), toy.run_of(3, 20)]
    sequences = [
        toy.Script(toy.prompt_of(1, 5), tuple(scripts[0])),
        toy.Script(toy.prompt_of(2, 5), tuple(scripts[1])),
    ]
    batch = toy.ToyBatch(sequences, 1)
    batch.tick()
    batch.propose()
    batch.state = state.release(batch.state, jnp.int32(0))
    while batch.state.active.any():
        batch.tick()
        batch.propose()
    assert batch.output(1) == scripts[1]
    assert int(batch.state.length[0]) == 0

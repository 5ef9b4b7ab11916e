"""check_lossless.py: it passes what is lossless, and a broken promise does not pass."""

import contextlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from metrale_jax import accept, statistics, steps, verify
from metrale_jax.drafters import confidence
from metrale_jax.engine import batch

# The first repeats itself as the target does, so that there is something to draft.
PROMPTS = ("--prompt=" + '"#$%' * 3, "--prompt=return n if n <")
# One shape for every run, so that programs compile once.
SHAPE = ("--batch_sizes=2", "--draft_counts=3", "--max_new_tokens=24")
NGRAM = ("--drafter=ngram", "--accept_rule=rejection", "--num_draws=256")
STRICT_MTP = ("--drafter=mtp", "--strict", "--num_draws=0")
ROW = {"batch_size", "num_drafts", "drafted", "accepted", "mean_accepted_length"}
GREEDY = ROW | {"num_tokens", "differences", "num_other_bits", "largest_gap", "verdict"}
SAMPLED = ROW | {"prompt", "num_draws", "first_token", "second_token", "verdict"}
SAMPLED |= {"most_frequent"}


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("check_lossless")


@pytest.fixture
def run(script, run_script, folder, tmp_path, monkeypatch):
    """Runs the script; returns (exit code, stdout, stderr, JSON)."""
    monkeypatch.setattr(sys, "argv", ["check_lossless.py", "--as", "a user"])
    path = tmp_path / "report.json"

    def run_with(*arguments):
        flags = (f"--checkpoint={folder}", *SHAPE, *PROMPTS, f"--json={path}")
        code, out, err = run_script(script, *flags, *arguments)
        report = json.loads(path.read_text()) if path.exists() else None
        return code, out, err, report

    return run_with


@pytest.mark.slow
def test_ngram_drafts_change_neither_tokens_nor_their_law(run):
    code, out, err, report = run(*NGRAM)
    assert code == 0
    assert "The promise held." in out
    assert "greedy: batch of 2, 3 drafts" in err
    assert report["is_lossless"] and report["num_violations"] == 0
    assert report["warnings"] == []
    assert report["command"] == "check_lossless.py --as 'a user'"
    assert (report["drafter"], report["dtype"]) == ("ngram", "float32")
    assert report["max_logit_gap"] == 1e-3
    [row] = report["greedy"]
    assert row.keys() == GREEDY
    assert (row["batch_size"], row["num_drafts"]) == (2, 3)
    assert row["verdict"] in ("same", "near tie")
    assert row["num_tokens"] == 48 or row["differences"]
    # Otherwise this shows nothing.
    assert row["accepted"] > 0 and row["mean_accepted_length"] > 1
    assert [row["prompt"] for row in report["sampled"]] == [0, 1]
    for row in report["sampled"]:
        assert row.keys() == SAMPLED
        assert row["verdict"] == "fits"
        assert row["num_draws"] == 128 and row["batch_size"] == 64
        fit = row["first_token"]
        assert fit.keys() == {"num_draws", "num_cells", "statistic", "p_value"}
        assert fit["num_draws"] == 128 and fit["num_cells"] >= 2
        assert fit["p_value"] >= 1e-4
        assert 20 <= row["second_token"]["num_draws"] < 128
    # Some drafts of the repetitive prompt stand, and some fall.
    repetitive = report["sampled"][0]
    assert 0 < repetitive["accepted"] < repetitive["drafted"]


def test_a_rule_that_accepts_every_draft_fails_the_draws(run, monkeypatch):
    monkeypatch.setitem(verify._RULES, "rejection", accept_everything)
    with patched(steps.verify_batched):
        code, out, _, report = run(*NGRAM)
    assert code == 2
    assert "The promise is BROKEN in 1 rows." in out
    assert not report["is_lossless"] and report["num_violations"] == 1
    [row] = report["greedy"]
    assert row["verdict"] != "violation"
    row = report["sampled"][0]
    assert row["accepted"] == row["drafted"] > 0
    assert row["verdict"] == "violation"
    assert row["first_token"]["p_value"] < 1e-4


def test_a_strict_head_changes_no_bit(run):
    code, _, _, report = run(*STRICT_MTP)
    assert code == 0
    assert report["strict"] and report["max_logit_gap"] == 0
    assert report["sampled"] == []
    [row] = report["greedy"]
    assert row["verdict"] == "same"
    assert (row["num_tokens"], row["num_other_bits"]) == (48, 0)
    # An untrained head is never right here, and the user is told.
    assert row["drafted"] > 0 and row["accepted"] == 0
    assert "No draft was accepted" in report["warnings"][0]


def test_a_verify_that_accepts_wrong_drafts_is_found(run, monkeypatch):
    monkeypatch.setattr(verify, "_num_leading", lambda hits, num_drafts: num_drafts)
    with patched(steps.verify_batched):
        code, out, _, report = run(*STRICT_MTP)
    assert code == 2
    assert "The promise is BROKEN in 1 rows." in out
    [row] = report["greedy"]
    assert row["verdict"] == "violation"
    assert row["mean_accepted_length"] > 3
    assert len(row["differences"]) == 2
    # Where the drafts led away, the target says how far.
    for difference in row["differences"]:
        assert difference["plain_below_best"] < 1e-3
        assert difference["logit_gap"] > 1e-3
        assert difference["speculative_below_best"] == pytest.approx(
            difference["logit_gap"] + difference["plain_below_best"], abs=1e-6
        )


def accept_everything(target_probs, draft_probs, drafts, num_drafts, uniforms):
    return accept.Acceptance(num_drafts, target_probs[:, -1])


@contextlib.contextmanager
def patched(step):
    """Traces the step anew, and once more for the tests after."""
    step.clear_cache()
    try:
        yield
    finally:
        step.clear_cache()


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--drafter=none"], ["--drafter is missing", "mtp, dflash, ngram"]),
        (["--drafter=ngram", "--prompt="], ["Prompt 2 is empty"]),
        (["--drafter=ngram", "--batch_sizes=0"], ["--batch_sizes", "positive"]),
        (["--drafter=ngram", "--batch_sizes="], ["--batch_sizes"]),
        (["--drafter=ngram", "--draft_counts=16"], ["--draft_counts", "1..15"]),
        (["--drafter=ngram", "--draft_counts=two"], ["--draft_counts", "two"]),
        (["--drafter=ngram", "--num_drafts=3"], ["--draft_counts or --num_drafts"]),
        (["--drafter=ngram", "--strict", "--max_logit_gap=1"], ["--strict"]),
        (["--drafter=ngram", "--temperature=0"], ["--temperature", "--num_draws=0"]),
        (["--drafter=ngram", "--top_p=0"], ["top_p"]),
        (["--drafter=ngram", "--seed=-1"], ["--seed"]),
        (["--drafter=ngram", "--significance=2"], ["significance"]),
        (["--drafter=ngram", "--json=/nonexistent/x.json"], ["--json"]),
        (["--drafter=ngram", "--self_layers=1"], ["--self_layers"]),
        (["--drafter=dflash"], ["--drafter_checkpoint"]),
        (["--drafter=ngram", "extra"], ["extra"]),
        (["--drafter=ngram", "--prompt=" + "x y " * 300], ["context is 256 tokens"]),
        (["--drafter=ngram", "--checkpoint=/nonexistent/m"], ["/nonexistent/m"]),
        (["--drafter=ngram", "--checkpoint="], ["--checkpoint is missing"]),
    ],
)
def test_bad_requests_end_with_one_line(run, arguments, parts):
    code, out, err, _ = run(*arguments)
    assert code == 1
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("check_lossless.py: ")
    for part in parts:
        assert part in last
    assert "Traceback" not in err


# The greedy part's judgement, on runs made by hand.

LOGITS = np.array([1.0, 0.9995, 0.5, -1.0], np.float32)


class FixedReference:
    """Always the same logits; notes what it was asked."""

    def __init__(self):
        self.asked = []

    def logits(self, tokens):
        self.asked.append(list(tokens))
        return LOGITS


class OneDrafter:
    max_drafts = 1


def result_of(*completions, statistics=None):
    return batch.BatchResult(
        completions=tuple(completions),
        statistics=statistics,
        compile_seconds=0.0,
        prefill_seconds=0.0,
        decode_seconds=0.0,
    )


def completion_of(*tokens, log_probs=()):
    return batch.Completion(
        token_ids=tokens,
        finish_reason="length",
        log_probs=tuple(
            batch.TokenLogProbs(emitted=value, top=()) for value in log_probs
        ),
    )


@pytest.fixture
def judge(script, monkeypatch):
    """Judges two runs of one sequence; returns the row and what was asked."""
    greedy = script.lossless_greedy

    def judge_runs(plain, speculative, *, strict=False):
        described = statistics.describe_statistics(1, 1, 0)
        nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), described)
        monkeypatch.setattr(
            greedy.batch_lib,
            "run_batch",
            lambda *args, **kwargs: result_of(speculative, statistics=(nothing,)),
        )
        target = script.lossless_target.Target(None, None, jnp.dtype(jnp.float32))
        options = greedy.GreedyOptions(
            max_new_tokens=4,
            max_logit_gap=0.0 if strict else 1e-3,
            strict=strict,
            accept_rule="match",
            limits=confidence.NO_LIMITS,
        )
        reference = FixedReference()
        row = greedy.check(
            target, reference, OneDrafter(), [(9, 8)], result_of(plain), options
        )
        return row, reference.asked

    return judge_runs


def test_equal_tokens_are_the_same(judge):
    row, asked = judge(completion_of(3, 0, 2), completion_of(3, 0, 2))
    assert (row.verdict, row.num_tokens, row.differences) == ("same", 3, ())
    assert asked == []


@pytest.mark.parametrize(
    "plain, speculative, below, verdict",
    [
        (0, 1, 5e-4, "near tie"),
        (1, 0, 5e-4, "near tie"),
        (0, 2, 0.5, "violation"),
        # A plain run that the target itself would not have given is no excuse.
        (2, 0, 0.5, "violation"),
        # Near each other, and both far from the best.
        (3, 2, 2.0, "violation"),
    ],
)
def test_the_first_difference_is_judged_by_the_target(
    judge, plain, speculative, below, verdict
):
    row, asked = judge(completion_of(3, plain, 1), completion_of(3, speculative, 2))
    assert asked == [[9, 8, 3]]
    assert row.verdict == verdict
    assert row.num_tokens == 2
    assert row.largest_gap == pytest.approx(below, rel=1e-3)
    [difference] = row.differences
    assert difference.position == 1
    assert difference.logit_gap == LOGITS[plain] - LOGITS[speculative]


def test_a_sequence_that_ends_early_is_no_near_tie(judge):
    row, _ = judge(completion_of(3, 0), completion_of(3))
    assert row.verdict == "violation"
    assert row.largest_gap is None
    [difference] = row.differences
    assert (difference.plain_token, difference.speculative_token) == (0, None)


def test_strict_allows_no_near_tie_and_no_other_bit(judge):
    row, _ = judge(completion_of(3, 0), completion_of(3, 1), strict=True)
    assert row.verdict == "violation"
    same = completion_of(3, 0, log_probs=(-1.0, -2.0))
    assert judge(same, same, strict=True)[0].verdict == "same"
    other = completion_of(3, 0, log_probs=(-1.0, np.nextafter(-2.0, -3.0)))
    row, _ = judge(same, other, strict=True)
    assert (row.verdict, row.num_other_bits) == ("violation", 1)


# The sampled part's statistics, against scipy.

PROBS = np.array([0.5, 0.3, 0.15, 0.03, 0.015, 0.005])


@pytest.fixture
def fit_draws(script):
    return script.lossless_sampled.fit_draws


def test_rare_tokens_share_a_cell(fit_draws):
    counts = np.array([52, 27, 12, 6, 2, 1])
    fit = fit_draws(counts, PROBS)
    # 3, 1.5 and 0.5 draws are expected of the last three: 5 together.
    expected = scipy.stats.chisquare([52, 27, 12, 9], [50, 30, 15, 5])
    assert (fit.num_draws, fit.num_cells) == (100, 4)
    assert fit.statistic == pytest.approx(expected.statistic)
    assert fit.p_value == pytest.approx(expected.pvalue, rel=1e-4)


def test_a_rare_rest_joins_the_rarest_cell(fit_draws):
    counts = np.array([25, 16, 5, 4, 0, 0])
    fit = fit_draws(counts, PROBS)
    expected = scipy.stats.chisquare([25, 16, 9], [25, 15, 10])
    assert fit.num_cells == 3
    assert fit.p_value == pytest.approx(expected.pvalue, rel=1e-4)


def test_one_cell_counts_what_is_beside_it(fit_draws):
    probs = np.array([0.99, 0.006, 0.004])
    for rest in (0, 1, 7):
        fit = fit_draws(np.array([100 - rest, rest, 0]), probs)
        expected = scipy.stats.binom.sf(rest - 1, 100, 0.01)
        assert fit.num_cells == 1
        assert fit.p_value == pytest.approx(expected, rel=1e-3)


def test_an_impossible_token_fails_whatever_its_number(fit_draws):
    assert fit_draws(np.array([500, 499, 1]), np.array([0.5, 0.5, 0])).p_value == 0


def test_too_few_draws_say_nothing(fit_draws):
    assert fit_draws(np.zeros(6, int), PROBS).p_value is None
    assert fit_draws(np.array([1, 1, 1, 0, 0, 0]), PROBS).p_value is None


def test_right_draws_pass_and_slightly_wrong_ones_fail(fit_draws):
    """Of right draws every tenth p-value is below 0.1; 5 % of wrong ones are found."""
    random = np.random.default_rng(0)
    p_values = [
        fit_draws(random.multinomial(500, PROBS), PROBS).p_value for _ in range(300)
    ]
    assert scipy.stats.kstest(p_values, "uniform").pvalue > 0.01
    wrong = PROBS + 0.05 * (np.eye(6)[5] - PROBS)
    assert fit_draws(random.multinomial(2000, wrong), PROBS).p_value < 1e-4

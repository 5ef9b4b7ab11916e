"""generate.py as a user meets it: what it prints, and how it refuses."""

import json
import shutil

import jax
import jax.numpy as jnp
import pytest
import tokenizers

from metrale_jax import checkpoint


@pytest.fixture(scope="module")
def generate_module(load_script):
    return load_script("generate")


@pytest.fixture
def run(generate_module, run_script):
    """Runs the script's main with flags; returns (exit code, stdout, stderr)."""
    return lambda *arguments: run_script(generate_module, *arguments)


@pytest.fixture(scope="session")
def jsonl(folder, tmp_path_factory):
    """Three prompts, two of which run together; records and statistics."""
    stats = tmp_path_factory.mktemp("stats") / "stats.json"
    prompts = ["def", "return n", "é✓ 🙂"]
    argv = [f"--checkpoint={folder}", *[f"--prompt={prompt}" for prompt in prompts]]
    argv += ["--max_new_tokens=9", "--batch_size=2", "--output=jsonl"]
    return prompts, [*argv, f"--stats_json={stats}"], stats


def test_jsonl_is_in_the_order_given(run, jsonl, folder):
    prompts, argv, stats_path = jsonl
    code, out, _ = run(*argv)
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["prompt"] for record in records] == prompts
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for record in records:
        assert record.keys() == {"prompt", "text", "token_ids", "finish_reason"}
        ended = record["finish_reason"] == "stop"
        assert ended or len(record["token_ids"]) == 9
        shown = record["token_ids"][:-1] if ended else record["token_ids"]
        assert tokenizer.decode(shown, skip_special_tokens=True) == record["text"]
    stats = json.loads(stats_path.read_text())
    assert stats["num_tokens"] == sum(len(record["token_ids"]) for record in records)
    for name in ("compile_seconds", "load_seconds", "prefill_seconds"):
        assert stats[name] > 0
    assert stats["tokens_per_second"] > 0


def test_text_and_prompt_file(run, folder, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("return n")
    arguments = (f"--checkpoint={folder}", "--max_new_tokens=9", "--batch_size=2")
    code, from_flag, err = run(*arguments, "--prompt=def", "--prompt=return n")
    assert code == 0
    assert "prompt 1" in err
    many = tmp_path / "prompts.jsonl"
    many.write_text('{"prompt": "def"}\n\n{"prompt": "return n", "x": "\u2028"}\n')
    assert run(*arguments, f"--prompt_file={many}")[1] == from_flag
    code, out, _ = run(*arguments, "--prompt=def", f"--prompt_file={path}")
    assert out == from_flag


def test_stop_string_ends_the_text(run, folder):
    arguments = (f"--checkpoint={folder}", "--max_new_tokens=9", "--output=jsonl")
    arguments += ("--prompt=def", "--prompt=return n")
    free = [json.loads(line) for line in run(*arguments)[1].splitlines()]
    stop = free[0]["text"][2:4]
    code, out, _ = run(*arguments, f"--stop={stop}")
    stopped = [json.loads(line) for line in out.splitlines()]
    assert stopped[0]["text"] == free[0]["text"][: free[0]["text"].index(stop)]
    assert stopped[0]["finish_reason"] == "stop"
    assert len(stopped[0]["token_ids"]) < 9
    if stop not in free[1]["text"]:
        assert stopped[1] == free[1]


def write_template(folder, tmp_path, template):
    copy = tmp_path / "chat"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text(template)
    return copy


def test_chat_uses_the_template(run, folder, tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    chat = write_template(folder, tmp_path, template)
    arguments = ("--max_new_tokens=3", "--batch_size=1", "--output=jsonl")
    code, out, _ = run(f"--checkpoint={chat}", "--chat", "--prompt=hi", *arguments)
    assert code == 0
    _, plain, _ = run(f"--checkpoint={chat}", "--prompt=<|im_start|>hi", *arguments)
    assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]


def assert_refused(result, *parts):
    code, out, err = result
    assert code == 1
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("generate.py: ")
    for part in parts:
        assert part in last
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ([], ["No prompt"]),
        (["--prompt="], ["Prompt 0 is empty"]),
        (["--prompt=a", "--prompt="], ["Prompt 1 is empty"]),
        (["--prompt=" + "x y " * 300], ["context is 256 tokens"]),
        (["--prompt=a", "--temperature=-1"], ["temperature", "-1"]),
        (["--prompt=a", "--temperature=warm"], ["temperature", "warm"]),
        (["--prompt=a", "--top_p=0"], ["top_p"]),
        (["--prompt=a", "--max_new_tokens=0"], ["max_new_tokens"]),
        (["--prompt=a", "--seed=-1"], ["seed"]),
        (["--prompt=a", "--dtype=int4"], ["dtype", "float32"]),
        (["--prompt=a", "--output=xml"], ["output", "jsonl"]),
        (["--prompt=a", "--batch_size=0"], ["batch_size"]),
        (["--prompt=a", "--stop="], ["stop"]),
        (["--prompt=a", "--promt=b"], ["promt"]),
        (["--prompt=a", "extra"], ["extra"]),
        (["--prompt_file=/nonexistent/file"], ["/nonexistent/file"]),
        (["--prompt=a", "--chat"], ["chat template"]),
        (["--prompt=a", "--stats_json=/nonexistent/s.json"], ["/nonexistent"]),
        (["--prompt=a", "--stats_json=/"], ["--stats_json=/"]),
        (["--prompt=a", "--prompt=b", f"--seed={2**64 - 1}"], ["--seed"]),
        (["--prompt", "help me", "--top_k=x"], ["top_k"]),
    ],
)
def test_bad_requests_end_with_one_line(run, folder, arguments, parts):
    assert_refused(run(f"--checkpoint={folder}", *arguments), *parts)


@pytest.mark.parametrize(
    "argument, part",
    [
        ("--checkpoint=/nonexistent/model", "/nonexistent/model"),
        ("--checkpoint=", "--checkpoint is missing"),
    ],
)
def test_unreadable_checkpoints_end_with_one_line(run, argument, part):
    assert_refused(run(argument, "--prompt=a"), part)


def test_bad_files_end_with_one_line(run, folder, tmp_path):
    bad = tmp_path / "prompts.jsonl"
    bad.write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    assert_refused(run(f"--checkpoint={folder}", f"--prompt_file={bad}"), f"{bad}:2")
    bad.write_text("[" * 100_000)
    assert_refused(run(f"--checkpoint={folder}", f"--prompt_file={bad}"), f"{bad}:1")
    bad.write_text("{")
    assert_refused(run(f"--checkpoint={folder}", f"--prompt_file={bad}"), f"{bad}:1")
    bad = tmp_path / "prompt.txt"
    bad.write_bytes(b"\xff\xfe")
    assert_refused(run(f"--checkpoint={folder}", f"--prompt_file={bad}"), "UTF-8")


def test_an_endless_template_ends_with_one_line(run, folder, tmp_path):
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    chat = write_template(folder, tmp_path, template + "{% endfor %}")
    result = run(f"--checkpoint={chat}", "--chat", "--prompt=a")
    assert_refused(result, "template")


def test_weights_that_are_not_finite_are_refused_when_asked(run, folder, tmp_path):
    copy = tmp_path / "nan"
    config, raw = checkpoint.read_config(folder)
    params = checkpoint.load_params(folder, config, dtype=jnp.dtype(jnp.float32))
    params = params.replace(final_norm=params.final_norm.at[3].set(jnp.nan))
    checkpoint.save_checkpoint(copy, jax.block_until_ready(params), raw, config)
    shutil.copy(folder / "tokenizer.json", copy)
    result = run(f"--checkpoint={copy}", "--prompt=a", "--check_finite")
    assert_refused(result, "norm")


# Drafters.

# Repeats itself as the target does, so that there is something to draft.
REPETITIVE = '"#$%' * 3


@pytest.fixture
def compare(run, folder, tmp_path):
    """Runs one prompt with drafts and without; returns (records, stats, stderr)."""

    def run_with(*arguments):
        path = tmp_path / "stats.json"
        flags = (f"--checkpoint={folder}", f"--prompt={REPETITIVE}")
        flags += ("--max_new_tokens=17", "--output=jsonl", f"--stats_json={path}")
        code, out, err = run(*flags, "--compare_plain", *arguments)
        assert code == 0, err
        records = [json.loads(line) for line in out.splitlines()]
        return records, json.loads(path.read_text()), err

    return run_with


def assert_statistics(stats, drafter):
    assert stats["drafter"] == drafter
    assert stats["num_tokens"] == 17
    for name in ("tokens_per_second", "plain_tokens_per_second"):
        assert stats[name] > 0
    assert stats["compile_seconds"] > 0 and stats["load_seconds"] > 0
    ratio = stats["tokens_per_second"] / stats["plain_tokens_per_second"]
    assert stats["speedup"] == pytest.approx(ratio)
    # The first token is prefill's; the rounds emit the others.
    assert stats["rounds"] * stats["mean_accepted_length"] == pytest.approx(16)
    assert stats["rounds"] + stats["accepted"] == 16
    assert stats["acceptance_rate"] == pytest.approx(
        stats["accepted"] / stats["drafted"]
    )


@pytest.mark.parametrize(
    "drafter, is_right",
    [
        ("ngram", True),
        ("mtp", False),
        pytest.param("prompt_lookup", True, marks=pytest.mark.slow),
        pytest.param("self", False, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_token(compare, drafter, is_right):
    [record], stats, err = compare(f"--drafter={drafter}", "--num_drafts=3")
    assert_statistics(stats, drafter)
    # Of float32 logits far apart.
    assert stats["identical"]
    assert len(record["token_ids"]) == 17
    assert "times as fast" in err and "the same tokens" in err
    assert stats["drafted"] > 0
    if is_right:
        assert stats["accepted"] > 0 and stats["mean_accepted_length"] > 1


def test_strict_runs_are_identical_log_probs_included(compare, run, folder):
    arguments = ("--drafter=ngram", "--strict", "--log_probs=2")
    [record], stats, _ = compare(*arguments)
    assert_statistics(stats, "ngram")
    assert stats["identical"] and stats["accepted"] > 0
    assert len(record["log_probs"]) == len(record["token_ids"]) == 17
    for token, entry in zip(record["token_ids"], record["log_probs"], strict=True):
        assert entry.keys() == {"emitted", "top"}
        assert len(entry["top"]) == 2
        # Greedy: the emitted token is the likeliest.
        assert (
            entry["top"][str(token)] == entry["emitted"] == max(entry["top"].values())
        )
        assert entry["emitted"] < 0


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--drafter=dflash"], ["--drafter_checkpoint=FOLDER_OR_HUB_ID"]),
        (["--drafter=ngram", "--drafter_checkpoint=x"], ["--drafter_checkpoint"]),
        (["--drafter=mtp", "--self_layers=1"], ["--self_layers", "mtp"]),
        (["--drafter=self", "--self_layers=one"], ["--self_layers", "one"]),
        (["--drafter=ngram", "--draft_sampling=sampled"], ["--draft_sampling"]),
        (["--drafter=magic"], ["drafter", "prompt_lookup"]),
        (["--num_drafts=3"], ["--num_drafts needs --drafter"]),
        (["--confidence_stop=0.5"], ["--confidence_stop needs --drafter"]),
        (["--compare_plain"], ["--compare_plain needs --drafter"]),
        (["--strict"], ["--strict needs --drafter"]),
        (["--drafter=ngram", "--confidence_stop=0.5"], ["--confidence_stop", "ngram"]),
        (
            ["--drafter=mtp", "--draft_sampling=sampled", "--prune_ratio=0.5"],
            ["--prune_ratio", "--draft_sampling=greedy"],
        ),
        (["--drafter=self", "--self_layers=0,9"], ["0..3", "9"]),
        (["--drafter=ngram", "--num_drafts=16"], ["num_drafts", "15"]),
        (
            ["--drafter=dflash", "--drafter_checkpoint=/nonexistent/m"],
            ["/nonexistent/m"],
        ),
        (["--drafter=mtp", "--confidence_stop=2"], ["confidence_stop"]),
        (["--log_probs=2"], ["--log_probs", "--output=jsonl"]),
        (["--logit_bias=5"], ["--logit_bias=5", "TOKEN_ID:NUMBER"]),
        (["--accept_rule=typical"], ["accept_rule", "rejection"]),
    ],
)
def test_contradictory_flags_end_with_one_line(run, folder, arguments, parts):
    assert_refused(run(f"--checkpoint={folder}", "--prompt=a", *arguments), *parts)

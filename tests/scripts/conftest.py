"""What the launchers' tests share: a checkpoint, and launchers run in-process."""

import dataclasses
import importlib.util
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
import tokenizers
from absl import flags
from absl.testing import flagsaver
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

import tiny_models as models
from metrale_jax import checkpoint
from metrale_jax.model import params as params_lib

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
TEXT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1)\n" * 20


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A checkpoint as a user has one: config, weights with an MTP head, tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    raw = models.RAW_DENSE | dict(
        vocab_size=300,
        eos_token_id=0,
        mtp_num_hidden_layers=1,
        tie_word_embeddings=False,
    )
    config_path = tmp_path_factory.mktemp("raw") / "config.json"
    config_path.write_text(json.dumps(raw))
    config, raw = checkpoint.read_config(config_path.parent)
    params = make_repetitive(
        params_lib.init_params(config, rng_key=jax.random.key(0), with_mtp=True)
    )
    checkpoint.save_checkpoint(folder, params, raw, config)
    tokenizer = tokenizers.Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_repetitive(params):
    """Makes four tokens follow each other in turn, so that drafts can be right.

    The likeliest next token has a probability near a half. Tokens 4 to 7 are `"#$%`.
    """
    embedding = jax.random.normal(jax.random.key(1), params.embedding.shape)
    token = jnp.arange(len(embedding))
    previous = token // 4 * 4 + (token - 1) % 4
    return dataclasses.replace(
        params, embedding=embedding, lm_head=0.25 * embedding[previous]
    )


@pytest.fixture(scope="module")
def load_script():
    """Loads launchers by name; their flags are gone after the module's tests.

    Launchers define flags of the same names, as programs of their own.
    """
    others = dict(flags.FLAGS._flags())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))

        def load(name):
            path = SCRIPTS / f"{name}.py"
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module

        yield load
    for name in set(flags.FLAGS._flags()) - set(others):
        delattr(flags.FLAGS, name)
    for name in ("launcher", "drafter_flags", "target_flags"):
        sys.modules.pop(name, None)


@pytest.fixture
def run_script(capsys):
    """Runs a launcher's main with flags; returns (exit code, stdout, stderr)."""

    def run(module, *arguments):
        name = pathlib.Path(module.__file__).name
        argv = [name, "--compilation_cache=", *map(str, arguments)]
        saved = flagsaver.save_flag_values()
        code = 0
        try:
            module.main(module.launcher.parse_flags(argv))
        except SystemExit as exit:
            code = exit.code
        finally:
            flagsaver.restore_flag_values(saved)
            flags.FLAGS.unparse_flags()
        output = capsys.readouterr()
        return code, output.out, output.err

    return run

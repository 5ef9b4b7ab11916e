"""README's code runs as it stands, and no page has a blank left to fill."""

import pathlib
import re

import jax
import pytest

import tiny_models as models
from metrale_jax import checkpoint, steps

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ("README.md", "WORKSPACE.md")


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_left_to_fill_in(page):
    text = (ROOT / page).read_text()
    assert re.findall(r"\b[A-Z]+_(?:TABLE|FIGURES?)\b|\bTODO\b|\bTBD\b", text) == []


def test_library_example_gives_what_plain_decoding_gives(tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    config = models.DENSE
    params = models.make_params(config)
    checkpoint.save_checkpoint(folder, params, models.RAW_DENSE, config)
    text = (ROOT / "README.md").read_text()
    example, drafter = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    example = example.replace("path/to/checkpoint", str(folder))
    example = example.replace("[[100, 200, 300]]", "[[100, 20, 30]]")
    # Users have neither of the tests' strict settings.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        names: dict = {}
        exec(compile(example, "README.md", "exec"), names)
        exec(compile(drafter, "README.md", "exec"), names)
        proposed = steps.propose(
            params,
            models.start(params, config, models.make_state(config), 1, [100, 20, 30]),
            names["RepeatLast"](),
            config=config,
        )
    assert proposed.proposal.num_drafts.tolist() == [0, 3, 0]
    assert set(proposed.proposal.drafts[1].tolist()) == {int(proposed.last_token[1])}
    printed, figure = capsys.readouterr().out.splitlines()
    assert float(figure.split()[0]) >= 1.0
    state = models.start(params, config, models.make_state(config), 0, [100, 20, 30])
    state = models.decode(params, config, state, 24)
    expected = models.output_tokens(state, 0, 3)
    tokens = [int(token) for token in re.findall(r"\d+", printed)]
    assert len(tokens) >= 20
    assert tokens == expected[: len(tokens)]

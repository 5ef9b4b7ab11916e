"""Golden facts of published models: sizes, tensor counts, and every name and shape."""

import math

import jax
import jax.numpy as jnp
import pytest
import torch
import transformers

from checkpoint import published
from metrale_jax import config as config_lib
from metrale_jax.checkpoint import layout
from metrale_jax.model import params as params_lib

# Parameters without and with nothing but the MTP head, and tensors of that head as
# published: 15 of a dense model, 19 with stacked experts, 17 + 3 * 512 without.
GOLDEN = {
    published.qwen3_5_0_8b: (752_393_024, 20_452_864, 15),
    published.qwen3_5_27b: (26_895_998_464, 424_699_392, 15),
    published.qwen3_5_35b_a3b: (34_660_610_688, 844_640_768, 19),
    published.qwen3_next_80b_a3b: (79_674_391_296, 1_650_471_424, 17 + 3 * 512),
}
CLASSES = {
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def describe(raw):
    config = config_lib.parse_model_config(raw)
    specs = params_lib.describe_params(
        config, dtype=jnp.dtype(jnp.bfloat16), with_mtp=True
    )
    return config, specs


def count(specs) -> int:
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs))


def published_tensors(tree) -> dict[str, tuple[int, ...]]:
    tensors = {}
    for forms in jax.tree.leaves(tree):
        tensors |= forms.published.tensors()
    return tensors


@pytest.mark.parametrize("make", GOLDEN, ids=lambda make: make.__name__)
def test_parameter_and_tensor_counts_are_the_published_ones(make):
    config, specs = describe(make())
    num_params, num_mtp_params, num_mtp_tensors = GOLDEN[make]
    assert count(specs.mtp) == num_mtp_params
    assert count(specs) - count(specs.mtp) == num_params
    tree = layout.describe_layout(config, specs, layout.NESTED_PREFIX)
    tensors = published_tensors(tree)
    mtp = {name for name in tensors if name.startswith("mtp.")}
    assert len(mtp) == num_mtp_tensors
    stored = sum(math.prod(shape) for shape in tensors.values())
    assert stored == num_params + num_mtp_params


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("make", GOLDEN, ids=lambda make: make.__name__)
def test_names_and_shapes_are_those_of_transformers(make):
    raw = make()
    config, specs = describe(raw)
    auto = transformers.AutoConfig.for_model(**raw).get_text_config()
    with torch.device("meta"):
        model = getattr(transformers, CLASSES[raw["model_type"]])(auto)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    tree = layout.describe_layout(config, specs.replace(mtp=None), layout.FLAT_PREFIX)
    found = {}
    for forms in jax.tree.leaves(tree):
        # In memory, transformers stacks the experts of every family.
        fitting = [
            form for form in forms.all if form.tensors().keys() <= expected.keys()
        ]
        found |= fitting[0].tensors()
    assert found == expected


def test_pieces_cover_each_parameter_and_each_tensor_once():
    raw = published.qwen3_next_80b_a3b() | {"num_hidden_layers": 4, "num_experts": 3}
    raw |= {"num_experts_per_tok": 2}
    config, specs = describe(raw)
    tree = layout.describe_layout(config, specs, layout.FLAT_PREFIX)
    used: dict[str, int] = {}
    for spec, forms in zip(jax.tree.leaves(specs), jax.tree.leaves(tree), strict=True):
        for form in forms.all:
            pieces = list(form.pieces())
            covered = sum(math.prod(piece.size) for piece in pieces)
            assert covered == math.prod(spec.shape)
        for piece in forms.published.pieces():
            used[piece.tensor] = used.get(piece.tensor, 0) + math.prod(piece.size)
    shapes = published_tensors(tree)
    assert used == {name: math.prod(shape) for name, shape in shapes.items()}

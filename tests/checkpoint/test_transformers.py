"""transformers as the oracle: its files load, ours load in it, with the same logits."""

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from transformers.integrations import finegrained_fp8
from transformers.models.qwen3_next import modeling_qwen3_next

from checkpoint import builders
from metrale_jax import checkpoint
from metrale_jax.checkpoint import inventory, layout, reading

FLOAT32 = jnp.dtype(jnp.float32)
CLASSES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": builders.HIDDEN,
    "num_position_embeddings": 16,
}
TOKENS = torch.arange(1, 90, 4)[None]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def one_thread():
    """Keeps torch's threads from waiting for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(raw, class_name=None):
    """Returns a random model, every parameter drawn, norms and decays too."""
    config = transformers.AutoConfig.for_model(**raw)
    model = getattr(transformers, class_name or CLASSES[raw["model_type"]])(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return model.float().eval()


def logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.numpy()


def load(folder, **kwargs):
    config, raw = checkpoint.read_config(folder)
    params = checkpoint.load_params(folder, config, dtype=FLOAT32, **kwargs)
    return config, raw, params


def assert_same_model(folder, model):
    """Requires that transformers loads `folder` as `model`, bit for bit."""
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    assert loaded.dtype == torch.float32
    # Weights of a mapped file lie unaligned, which can change torch's last digits.
    loaded.load_state_dict(
        {name: value.clone() for name, value in loaded.state_dict().items()},
        assign=True,
    )
    loaded.tie_weights()
    np.testing.assert_array_equal(logits(loaded.eval()), logits(model))


@pytest.mark.parametrize(
    ("model_type", "is_tied"),
    [
        ("qwen3_next", False),
        ("qwen3_5_text", False),
        ("qwen3_5_text", True),
        ("qwen3_5_moe_text", False),
    ],
)
def test_logits_survive_load_and_save(tmp_path, model_type, is_tied):
    raw = builders.raw_config(model_type, tie_word_embeddings=is_tied)
    model = make_model(raw)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    config, raw, params = load(tmp_path / "theirs")
    checkpoint.save_checkpoint(
        tmp_path / "ours", params, raw, config, max_shard_bytes=100_000
    )
    assert_same_model(tmp_path / "ours", model)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_multimodal_files_load_without_their_vision_tower(tmp_path, model_type):
    raw = builders.raw_config(model_type) | {"vision_config": VISION}
    class_name = CLASSES[f"{model_type}_text"]
    model = make_model(raw, class_name.replace("CausalLM", "ConditionalGeneration"))
    model.save_pretrained(tmp_path / "theirs")
    config, raw, params = load(tmp_path / "theirs")
    checkpoint.save_checkpoint(tmp_path / "ours", params, raw, config)
    # Its causal class reads the text model out of a nested checkpoint.
    assert_same_model(tmp_path / "ours", model)


def test_fused_projections_come_apart_as_in_transformers(tmp_path):
    raw = builders.raw_config("qwen3_next")
    model = make_model(raw)
    layer = model.model.layers[0].linear_attn
    assert isinstance(layer, modeling_qwen3_next.Qwen3NextGatedDeltaNet)
    x = torch.randn(1, 5, builders.HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        parts = layer.fix_query_key_value_ordering(
            layer.in_proj_qkvz(x), layer.in_proj_ba(x)
        )
    query, key, value, z, b, a = (part.flatten(2).numpy()[0] for part in parts)
    expected = {
        "in_proj_qkv": np.concatenate([query, key, value], axis=-1),
        "in_proj_z": z,
        "in_proj_b": b,
        "in_proj_a": a,
    }
    model.save_pretrained(tmp_path)
    mixer = load(tmp_path)[2].layers[0].mixer
    for name, outputs in expected.items():
        found = x.numpy()[0] @ np.asarray(getattr(mixer, name)).T
        np.testing.assert_allclose(found, outputs, rtol=1e-5, atol=1e-6)


def test_block_scaled_float8_means_the_same_to_transformers(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 200, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, generator=generator)
    expected = finegrained_fp8._dequantize_fp8_weight(
        weight, scale, [128, 128], torch.float32
    )
    stored = {"w": weight, "w_scale_inv": scale}
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    out = reading.empty_aligned((300, 200), np.dtype(np.float32))
    with reading.TensorReader(inventory.scan(tmp_path)) as reader:
        reader.fill(out, layout.Whole("w", (300, 200), (300, 200)), (0, 0))
    np.testing.assert_array_equal(out, expected.numpy())

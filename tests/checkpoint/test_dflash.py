"""Folders of DFlash drafters: what config.json may say, and which tensors count."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import tiny_models as models
from metrale_jax import checkpoint
from metrale_jax.checkpoint import CheckpointError
from metrale_jax.drafters import dflash_config, dflash_params

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 24, 4, 2, 8, 128
LAYERS, TAPS = 2, [0, 2]
FULL, SLIDING = "full_attention", "sliding_attention"
FLOAT32 = jnp.dtype(jnp.float32)
BFLOAT16 = jnp.dtype(jnp.bfloat16)

NESTED = dict(block_size=16, mask_token_id=120, target_layer_ids=TAPS)
RAW = dict(
    architectures=["DFlashDraftModel"],
    model_type="qwen3",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    max_position_embeddings=4096,
    num_target_layers=4,
    layer_types=[SLIDING, FULL],
    sliding_window=2048,
    dflash_config=NESTED,
)


def parse(**changes: Any):
    return dflash_config.parse_dflash_config(RAW | changes)


def without(*keys: str, **nested: Any) -> dict[str, Any]:
    """config.json without some keys, wherever they stand, and with others nested."""
    raw = {key: value for key, value in RAW.items() if key not in keys}
    kept = {key: value for key, value in NESTED.items() if key not in keys}
    return raw | dict(dflash_config=kept | nested)


def layer_shapes(index: int) -> dict[str, tuple[int, ...]]:
    shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate_proj.weight": (FFN, HIDDEN),
        "mlp.up_proj.weight": (FFN, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FFN),
    }
    return {f"layers.{index}.{name}": shape for name, shape in shapes.items()}


SHAPES = {
    "fc.weight": (HIDDEN, len(TAPS) * HIDDEN),
    "hidden_norm.weight": (HIDDEN,),
    "norm.weight": (HIDDEN,),
    **layer_shapes(0),
    **layer_shapes(1),
}
NUM_ROWS = 5
ROW_TOKENS = [3, 7, 8, 90, 127]
OWN_SHAPES = {
    "embed_tokens.weight": (VOCAB, HIDDEN),
    "lm_head.weight": (NUM_ROWS, HIDDEN),
    "mask_embedding": (HIDDEN,),
}


def make_tensors(shapes=SHAPES, dtype=FLOAT32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(shape).astype(jnp.bfloat16).astype(dtype)
        for name, shape in shapes.items()
    }


def make_own_tensors() -> dict[str, np.ndarray]:
    tensors = make_tensors(SHAPES | OWN_SHAPES)
    tensors["d2t"] = np.array(ROW_TOKENS) - np.arange(NUM_ROWS)
    tensors["t2d"] = np.isin(np.arange(VOCAB), ROW_TOKENS)
    return tensors


def write(folder, tensors, raw=RAW):
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def load(folder, dtype=FLOAT32, target=None):
    return checkpoint.load_dflash(folder, dtype=dtype, target_config=target)


def test_reads_published_names_and_shapes(tmp_path):
    tensors = make_tensors()
    # 11 per layer and 3, as published.
    assert len(tensors) == 11 * LAYERS + 3
    config, params = load(write(tmp_path, tensors), target=models.DENSE)
    assert config == parse()
    assert params.embedding is params.lm_head is params.d2t is None
    assert params.mask_embedding is None
    for leaf, name in (
        (params.fc, "fc.weight"),
        (params.hidden_norm, "hidden_norm.weight"),
        (params.final_norm, "norm.weight"),
        (params.layers[0].input_norm, "layers.0.input_layernorm.weight"),
        (params.layers[1].post_norm, "layers.1.post_attention_layernorm.weight"),
        (params.layers[1].q_proj, "layers.1.self_attn.q_proj.weight"),
        (params.layers[1].k_proj, "layers.1.self_attn.k_proj.weight"),
        (params.layers[1].v_proj, "layers.1.self_attn.v_proj.weight"),
        (params.layers[0].o_proj, "layers.0.self_attn.o_proj.weight"),
        (params.layers[0].q_norm, "layers.0.self_attn.q_norm.weight"),
        (params.layers[0].k_norm, "layers.0.self_attn.k_norm.weight"),
        (params.layers[0].mlp.gate_proj, "layers.0.mlp.gate_proj.weight"),
        (params.layers[0].mlp.up_proj, "layers.0.mlp.up_proj.weight"),
        (params.layers[0].mlp.down_proj, "layers.0.mlp.down_proj.weight"),
    ):
        np.testing.assert_array_equal(leaf, tensors[name], err_msg=name)


def test_golden_sizes_of_a_published_drafter():
    """Of Qwen3.6-27B: 58 tensors, 1.73 billion parameters."""
    config = parse(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        layer_types=[SLIDING] * 4 + [FULL],
        num_target_layers=64,
        vocab_size=248320,
        dflash_config=dict(
            block_size=16,
            mask_token_id=248070,
            target_layer_ids=[1, 16, 31, 46, 61],
        ),
    )
    specs = dflash_params.describe_dflash_params(config, dtype=BFLOAT16)
    leaves = jax.tree.leaves(specs)
    assert len(leaves) == 58
    num_parameters = sum(spec.num_bytes for spec in leaves) // 2
    assert round(num_parameters / 1e9, 2) == 1.73


def test_a_prefix_changes_nothing(tmp_path):
    tensors = make_own_tensors()
    plain = load(write(tmp_path / "plain", tensors))
    # Heads and maps often stay outside of the model that has the prefix.
    outside = ("lm_head.weight", "d2t", "t2d")
    below = {
        name if name in outside else f"model.{name}": tensor
        for name, tensor in tensors.items()
    }
    prefixed = load(write(tmp_path / "prefixed", below))
    assert plain[0] == prefixed[0]
    jax.tree.map(np.testing.assert_array_equal, plain[1], prefixed[1])


@pytest.mark.parametrize("says_so", [True, False])
def test_own_embedding_and_head(tmp_path, says_so):
    raw = RAW | (dict(draft_vocab_size=NUM_ROWS) if says_so else {})
    tensors = make_own_tensors()
    config, params = load(write(tmp_path, tensors, raw), target=models.DENSE)
    assert config.has_embedding and config.has_head and config.has_mask_embedding
    assert config.draft_vocab_size == config.head_size == NUM_ROWS
    assert (np.arange(NUM_ROWS) + np.asarray(params.d2t)).tolist() == ROW_TOKENS
    assert params.d2t.dtype == jnp.int32
    for leaf, name in (
        (params.embedding, "embed_tokens.weight"),
        (params.lm_head, "lm_head.weight"),
        (params.mask_embedding, "mask_embedding"),
    ):
        np.testing.assert_array_equal(leaf, tensors[name])


def test_a_full_head_needs_no_map(tmp_path):
    tensors = make_tensors(SHAPES | {"lm_head.weight": (VOCAB, HIDDEN)})
    config, params = load(write(tmp_path, tensors))
    assert config.has_head and config.draft_vocab_size is None
    np.testing.assert_array_equal(params.lm_head, tensors["lm_head.weight"])


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("kind", ["plain", "own"])
def test_round_trip(tmp_path, kind, dtype):
    tensors = make_own_tensors() if kind == "own" else make_tensors()
    raw = RAW | dict(
        is_causal=False,
        dflash_config=NESTED
        | dict(
            input_embedding_scale=2.5,
            output_multiplier=0.5,
            final_logit_softcapping=30.0,
        ),
    )
    config, params = load(write(tmp_path / "first", tensors, raw), dtype)
    checkpoint.save_dflash(tmp_path / "second", config, params)
    again_config, again = load(tmp_path / "second", dtype)
    assert again_config == config
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    stored = safetensors.numpy.load_file(tmp_path / "second" / "model.safetensors")
    assert set(stored) == set(tensors) - {"t2d"}
    assert {name: stored[name].dtype for name in ("d2t",) if name in stored} in (
        {},
        {"d2t": np.dtype(np.int64)},
    )
    assert stored["fc.weight"].dtype == dtype
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        checkpoint.save_dflash(tmp_path / "second", config, params)
    checkpoint.save_dflash(tmp_path / "second", config, params, overwrite=True)


def test_only_what_the_config_describes_is_saved(tmp_path):
    config, params = load(write(tmp_path / "first", make_tensors()))
    wrong = params.replace(fc=params.fc.T)
    with pytest.raises(ValueError, match=r"`params.fc` must be float32\[64, 128\]"):
        checkpoint.save_dflash(tmp_path / "second", config, wrong)
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    with pytest.raises(ValueError, match="one of bfloat16, float32"):
        checkpoint.save_dflash(tmp_path / "second", config, halves)
    assert not (tmp_path / "second").exists()


def test_float16_overflows_in_drafters(tmp_path):
    with pytest.raises(ValueError, match="`dtype` must be one of bfloat16, float32"):
        load(write(tmp_path, make_tensors()), jnp.dtype(jnp.float16))


@pytest.mark.parametrize("name", [*SHAPES, *OWN_SHAPES])
def test_a_missing_or_misshapen_tensor_is_named(tmp_path, name):
    tensors = make_own_tensors()
    misshapen = tensors | {name: tensors[name][:-1]}
    with pytest.raises(CheckpointError) as error:
        load(write(tmp_path, misshapen))
    assert error.value.tensor == name
    assert error.value.file == str(tmp_path / "model.safetensors")
    del tensors[name]
    if name in ("embed_tokens.weight", "mask_embedding"):
        config, _ = load(write(tmp_path, tensors))
        assert not (config.has_embedding and config.has_mask_embedding)
        return
    with pytest.raises(CheckpointError, match="missing") as error:
        load(write(tmp_path, tensors))
    assert error.value.tensor == name


@pytest.mark.parametrize(
    "name", ["layers.2.input_layernorm.weight", "encoder.fc.weight", "t2d", "fc.bias"]
)
def test_an_unused_tensor_is_named(tmp_path, name):
    tensors = make_tensors() | {name: np.ones(3, np.float32)}
    with pytest.raises(CheckpointError, match="unused") as error:
        load(write(tmp_path, tensors))
    assert error.value.tensor == name
    assert error.value.file == str(tmp_path / "model.safetensors")


def test_quantised_tensors_are_refused(tmp_path):
    tensors = make_tensors()
    tensors["fc.weight"] = tensors["fc.weight"].astype(np.int8)
    with pytest.raises(CheckpointError, match="quantisation is not supported") as error:
        load(write(tmp_path, tensors))
    assert error.value.tensor == "fc.weight"


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        (dict(d2t=np.arange(4)), "d2t", "shape"),
        (dict(d2t=np.zeros(NUM_ROWS, np.float32)), "d2t", "an offset for each row"),
        (dict(d2t=np.arange(NUM_ROWS)[::-1].copy()), "d2t", "distinct tokens"),
        (dict(d2t=np.full(NUM_ROWS, VOCAB)), "d2t", "distinct tokens"),
        (dict(d2t=np.full(NUM_ROWS, -1)), "d2t", "distinct tokens"),
        (dict(t2d=np.ones(VOCAB, bool)), "t2d", "marks other tokens"),
        (dict(t2d=np.ones(3, bool)), "t2d", "whether the head has it"),
    ],
)
def test_maps_of_ids_must_make_sense(tmp_path, changes, name, message):
    raw = RAW | dict(draft_vocab_size=NUM_ROWS)
    message = "an offset for each row" if message == "shape" else message
    with pytest.raises(CheckpointError, match=message) as error:
        load(write(tmp_path, make_own_tensors() | changes, raw))
    assert error.value.tensor == name


def test_a_reduced_head_needs_its_map(tmp_path):
    tensors = make_own_tensors()
    del tensors["d2t"]
    with pytest.raises(CheckpointError, match="`d2t`: is missing"):
        load(write(tmp_path, tensors, RAW | dict(draft_vocab_size=NUM_ROWS)))


def test_a_bad_config_names_the_file(tmp_path):
    folder = write(tmp_path, make_tensors(), without("target_layer_ids"))
    with pytest.raises(CheckpointError, match="`target_layer_ids`") as error:
        load(folder)
    assert error.value.file == str(tmp_path / "config.json")
    write(folder, make_tensors(), RAW | dict(num_hidden_layers=900, layer_types=None))
    with pytest.raises(CheckpointError, match="fewer tensors than"):
        load(folder)


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids"])
def test_keys_are_read_nested_and_flat(key):
    flat = without(key) | {key: NESTED[key]}
    assert dflash_config.parse_dflash_config(flat) == parse()
    # The nested one wins.
    both = RAW | {key: [1] if key == "target_layer_ids" else 7}
    assert dflash_config.parse_dflash_config(both) == parse()


def test_a_config_without_a_nested_part():
    flat = {key: RAW[key] for key in RAW if key != "dflash_config"} | NESTED
    assert dflash_config.parse_dflash_config(flat) == parse()


@pytest.mark.parametrize(
    ("top", "nested", "expected"),
    [
        ({}, {}, (True, False)),
        ({}, dict(causal=True), (True, True)),
        ({}, dict(causal=False), (False, False)),
        (dict(is_causal=False), dict(causal=True), (False, False)),
        (dict(is_causal=True), dict(causal=False), (True, True)),
    ],
)
def test_which_layers_are_causal(top, nested, expected):
    config = parse(**top, dflash_config=NESTED | nested)
    assert tuple(map(config.layer_is_causal, range(LAYERS))) == expected


def test_windows():
    config = parse()
    assert [config.layer_window(index) for index in range(LAYERS)] == [2048, None]
    # A window beside full layers only is of no effect.
    assert parse(layer_types=[FULL, FULL]).window is None
    nested = NESTED | dict(use_swa=True, swa_window_size=64)
    config = parse(layer_types=None, dflash_config=nested)
    assert config.layers == (SLIDING, SLIDING)
    assert config.window == 64
    assert parse(layer_types=None).layers == (FULL, FULL)


def test_rope_settings():
    rope = dict(rope_type="default", rope_theta=5e6)
    assert parse(rope_parameters=rope).rope_theta == 5e6
    assert parse(rope_scaling=None).rope_theta == 1e7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["DFlash2DraftModel"]),
        ("architectures", None),
        ("model_type", "llama"),
        ("conv_kernel_size", 2),
        ("conv_group_size", 16),
        ("selector_rank", 256),
        ("selector_top_k", 16),
        ("projector_type", "dspark"),
        ("projector_type", "domino"),
        ("attention_sink_bias", True),
        ("attention_value_scale", 0.5),
        ("sample_from_anchor", True),
        ("is_neox_style", False),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.25),
        ("rope_scaling", dict(rope_type="yarn", factor=4.0)),
        ("rope_scaling", dict(type="linear", factor=4.0)),
        ("rope_parameters", dict(partial_rotary_factor=0.5)),
    ],
)
@pytest.mark.parametrize("is_nested", [True, False])
def test_unsupported_settings_say_what_is_supported(key, value, is_nested):
    change = {key: value}
    raw = without(key, **change) if is_nested else RAW | change
    with pytest.raises(NotImplementedError, match=f"`{key}.*supported is"):
        dflash_config.parse_dflash_config(raw)


def test_settings_that_spell_out_the_default_are_fine():
    nested = NESTED | dict(
        projector_type="dflash",
        attention_sink_bias=False,
        attention_value_scale=1.0,
        sample_from_anchor=False,
        is_neox_style=True,
        input_embedding_scale=1.0,
        output_multiplier=1,
        final_logit_softcapping=None,
    )
    assert parse(attention_bias=False, dflash_config=nested) == parse()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_layer_ids", []),
        ("target_layer_ids", [0, 4]),
        ("target_layer_ids", [-1, 2]),
        ("target_layer_ids", [0.0, 2]),
        ("target_layer_ids", "0,2"),
        ("mask_token_id", VOCAB),
        ("mask_token_id", -1),
        ("mask_token_id", None),
        ("block_size", 1),
        ("block_size", None),
        ("block_size", "16"),
        ("num_target_layers", None),
        ("num_target_layers", 0),
        ("sliding_window", None),
        ("sliding_window", 0),
        ("layer_types", [FULL]),
        ("layer_types", [FULL, "linear_attention"]),
        ("use_swa", False),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", None),
        ("hidden_size", None),
        ("hidden_size", 0),
        ("intermediate_size", -1),
        ("num_attention_heads", 3),
        ("num_key_value_heads", 0),
        ("head_dim", 7),
        ("vocab_size", None),
        ("draft_vocab_size", VOCAB + 1),
        ("draft_vocab_size", 0),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", 0),
        ("rope_theta", -1),
        ("input_embedding_scale", 0),
        ("output_multiplier", "2"),
        ("final_logit_softcapping", 0),
        ("is_causal", "yes"),
        ("causal", 1),
        ("tie_word_embeddings", "no"),
    ],
)
def test_wrong_values_name_the_key(key, value):
    is_nested = key in NESTED
    changes = without(key, **{key: value}) if is_nested else RAW | {key: value}
    with pytest.raises(ValueError, match=f"`{key}`"):
        dflash_config.parse_dflash_config(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=32), "`hidden_size` of the drafter must be the target's 64"),
        (dict(num_target_layers=24), "`num_target_layers` of the drafter"),
        (
            dict(vocab_size=400, dflash_config=NESTED | dict(mask_token_id=128)),
            r"`mask_token_id` must be in 0\.\.127",
        ),
    ],
)
def test_the_target_must_fit(changes, message):
    dflash_config.check_target(parse(), models.DENSE)
    with pytest.raises(ValueError, match=message):
        dflash_config.check_target(parse(**changes), models.DENSE)


def test_an_own_embedding_must_cover_the_target(tmp_path):
    raw = RAW | dict(vocab_size=VOCAB - 1)
    shapes = SHAPES | {"embed_tokens.weight": (VOCAB - 1, HIDDEN)}
    folder = write(tmp_path, make_tensors(shapes), raw)
    config, _ = load(folder)
    assert config.has_embedding
    with pytest.raises(ValueError, match="at least the target's 128"):
        load(folder, target=models.DENSE)

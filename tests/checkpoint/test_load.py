"""Loading: every published form gives the same parameters, or is refused by name."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoint import builders
from metrale_jax import checkpoint
from metrale_jax.checkpoint import CheckpointError, inventory, layout, reading
from metrale_jax.model import params as params_lib

BFLOAT16 = jnp.dtype(jnp.bfloat16)
FLOAT32 = jnp.dtype(jnp.float32)


def load(folder: pathlib.Path, **kwargs: Any) -> params_lib.ModelParams:
    config, _ = checkpoint.read_config(folder)
    return checkpoint.load_params(folder, config, **{"dtype": BFLOAT16} | kwargs)


def write_and_load(folder, tensors, raw, *, num_files=1, **kwargs):
    builders.write_checkpoint(folder, tensors, raw, num_files=num_files)
    return load(folder, **kwargs)


def assert_equal(params, expected):
    def check(value, wanted):
        assert value.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(value), wanted)

    jax.tree.map(check, params, expected)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("model_type", builders.MODEL_TYPES)
def test_every_family_loads_in_either_form(tmp_path, model_type, fused):
    raw = builders.raw_config(model_type)
    tensors = builders.make_tensors(raw, fused=fused)
    params = write_and_load(tmp_path, tensors, raw, num_files=3, with_mtp=True)
    expected = builders.expected_params(tensors, raw, dtype=BFLOAT16, with_mtp=True)
    assert_equal(params, expected)


@pytest.mark.parametrize("stored", [jnp.bfloat16, np.float16, np.float32], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_is_converted_and_decays_stay_float32(tmp_path, stored, dtype):
    raw = builders.raw_config("qwen3_next")
    tensors = builders.make_tensors(raw, dtype=stored, with_mtp=False)
    params = write_and_load(tmp_path, tensors, raw, dtype=jnp.dtype(dtype))
    assert_equal(params, builders.expected_params(tensors, raw, dtype=dtype))
    assert params.layers[0].mixer.a_log.dtype == jnp.float32
    assert params.layers[0].mixer.dt_bias.dtype == jnp.float32


LOCATIONS = [
    ("model.", "lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
    ("language_model.model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
]


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5", "qwen3_5_text"])
@pytest.mark.parametrize(("prefix", "head"), LOCATIONS)
def test_prefix_is_found_whatever_the_config_is_like(
    tmp_path, model_type, prefix, head
):
    raw = builders.raw_config(model_type)
    place = {"prefix": prefix, "head": head}
    tensors = builders.make_tensors(raw, **place)
    params = write_and_load(tmp_path, tensors, raw)
    assert_equal(
        params, builders.expected_params(tensors, raw, dtype=BFLOAT16, **place)
    )


def test_norm_weights_are_copied_as_stored(tmp_path):
    raw = builders.raw_config("qwen3_5_text")
    tensors = builders.make_tensors(raw)
    for name, values in tensors.items():
        if "norm" in name:
            values[...] = 1 if "linear_attn.norm" in name else 0
    params = write_and_load(tmp_path, tensors, raw, with_mtp=True)
    assert params.mtp is not None
    layers = (*params.layers, *params.mtp.layers)
    centred = [params.final_norm, params.mtp.final_norm]
    centred += [params.mtp.embedding_norm, params.mtp.hidden_norm]
    centred += [
        norm for layer in layers for norm in (layer.input_norm, layer.post_norm)
    ]
    for layer in layers:
        if isinstance(layer.mixer, params_lib.DeltaNetParams):
            assert (layer.mixer.norm == 1).all()
        else:
            centred += [layer.mixer.q_norm, layer.mixer.k_norm]
    assert len(centred) == 2 + 2 + 5 * 2 + 2 * 2
    assert all((norm == 0).all() for norm in centred)


@pytest.mark.parametrize("seed", range(3))
def test_forms_may_be_mixed_and_tensors_in_any_order(tmp_path, seed):
    raw = builders.raw_config("qwen3_5_moe")
    tensors = builders.make_tensors(raw, fused=True)
    expected = builders.expected_params(tensors, raw, dtype=BFLOAT16)
    rng = np.random.default_rng(seed)
    prefix = "model.language_model.layers."
    tensors = builders.stack_experts(tensors, f"{prefix}{seed}.mlp.experts.")
    tensors = builders.deinterleave(tensors, f"{prefix}{2 - seed}.linear_attn.")
    names = rng.permutation(list(tensors))
    shuffled = {name: tensors[name] for name in names}
    params = write_and_load(tmp_path, shuffled, raw, num_files=1 + seed)
    assert_equal(params, expected)


def test_one_part_may_be_fused_beside_a_split_one(tmp_path):
    raw = builders.raw_config("qwen3_5_moe")
    tensors = builders.make_tensors(raw, fused=True)
    expected = builders.expected_params(tensors, raw, dtype=BFLOAT16)
    name = "model.language_model.layers.0."
    split = builders.deinterleave(tensors, name + "linear_attn.")
    stacked = builders.stack_experts(tensors, name + "mlp.experts.")
    # Of layer 0: qkvz fused but b and a split; gate and up stacked but down per expert.
    for part in ("b", "a"):
        part_name = f"{name}linear_attn.in_proj_{part}.weight"
        tensors[part_name] = split[part_name]
    del tensors[name + "linear_attn.in_proj_ba.weight"]
    tensors[name + "mlp.experts.gate_up_proj"] = stacked[
        name + "mlp.experts.gate_up_proj"
    ]
    for expert in range(builders.EXPERTS):
        for part in ("gate", "up"):
            del tensors[f"{name}mlp.experts.{expert}.{part}_proj.weight"]
    assert_equal(write_and_load(tmp_path, tensors, raw), expected)


def test_vision_and_unasked_mtp_are_left_out(tmp_path):
    raw = builders.raw_config("qwen3_5")
    tensors = builders.make_tensors(raw, with_vision=True)
    params = write_and_load(tmp_path, tensors, raw)
    assert params.mtp is None
    assert_equal(params, builders.expected_params(tensors, raw, dtype=BFLOAT16))


def test_family_without_vision_refuses_a_vision_tower(tmp_path):
    raw = builders.raw_config("qwen3_next")
    tensors = builders.make_tensors(raw, with_vision=True)
    with pytest.raises(CheckpointError, match=r"unused `model.visual.\S+, `visual"):
        write_and_load(tmp_path, tensors, raw)


def test_mtp_side_file_is_found(tmp_path):
    raw = builders.raw_config("qwen3_5_moe")
    tensors = builders.make_tensors(raw)
    head = {name: values for name, values in tensors.items() if name.startswith("mtp.")}
    rest = {name: values for name, values in tensors.items() if name not in head}
    builders.write_checkpoint(tmp_path, rest, raw, num_files=2)
    builders.write_tensors(tmp_path / "mtp.safetensors", head)
    expected = builders.expected_params(tensors, raw, dtype=BFLOAT16, with_mtp=True)
    assert_equal(load(tmp_path, with_mtp=True), expected)


def test_missing_mtp_head_is_an_error_when_asked_for(tmp_path):
    raw = builders.raw_config("qwen3_5")
    tensors = builders.make_tensors(raw, with_mtp=False)
    with pytest.raises(CheckpointError, match="missing `mtp.*and 10 more; the multi"):
        write_and_load(tmp_path, tensors, raw, with_mtp=True)


def test_mtp_of_a_config_without_one_is_an_error(tmp_path):
    raw = builders.raw_config("qwen3_5", mtp_num_hidden_layers=0)
    tensors = builders.make_tensors(raw, with_mtp=False)
    with pytest.raises(ValueError, match="mtp_num_hidden_layers"):
        write_and_load(tmp_path, tensors, raw, with_mtp=True)


def refusal(folder, tensors, raw, **kwargs) -> CheckpointError:
    """Returns the error of loading, which must not have read any tensor."""
    with pytest.raises(CheckpointError) as raised:
        write_and_load(folder, tensors, raw, **kwargs)
    assert str(raised.value).isprintable()
    return raised.value


@pytest.fixture
def forbid_reading(monkeypatch):
    """Fails the test if loading gets as far as reading tensors."""

    def refuse(*args, **kwargs):
        pytest.fail("tensors were read before the headers had been checked")

    monkeypatch.setattr(reading, "TensorReader", refuse)


RENAMED = "model.layers.1.linear_attn.out_proj.weight"


@pytest.mark.usefixtures("forbid_reading")
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_renamed_tensor_is_named_as_missing_and_unused(tmp_path, model_type):
    raw = builders.raw_config(model_type)
    tensors = builders.make_tensors(raw)
    tensors[RENAMED + "s"] = tensors.pop(RENAMED)
    error = refusal(tmp_path, tensors, raw)
    assert f"missing `{RENAMED}`; unused `{RENAMED}s`" in str(error)
    assert error.tensor == RENAMED


@pytest.mark.usefixtures("forbid_reading")
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.linear_attn.A_log",
        "model.layers.0.linear_attn.in_proj_ba.weight",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.2.mlp.experts.3.up_proj.weight",
        "model.layers.2.mlp.shared_expert_gate.weight",
        "mtp.fc.weight",
        "mtp.layers.0.mlp.experts.0.down_proj.weight",
    ],
)
def test_missing_or_misshapen_tensor_is_named(tmp_path, name):
    raw = builders.raw_config("qwen3_next")
    tensors = builders.make_tensors(raw)
    shape = tensors[name].shape
    wrong = dict(tensors)
    wrong[name] = np.zeros((*shape[:-1], shape[-1] + 1), np.float32)
    error = refusal(tmp_path / "wrong", wrong, raw, with_mtp=True)
    assert (error.tensor, error.expected, error.found) == (
        name,
        shape,
        wrong[name].shape,
    )
    assert error.file == str(tmp_path / "wrong" / "model.safetensors")
    del tensors[name]
    error = refusal(tmp_path / "gone", tensors, raw, with_mtp=True)
    assert error.tensor == name
    assert f"missing `{name}`" in str(error)


@pytest.mark.usefixtures("forbid_reading")
def test_missing_tensors_are_counted(tmp_path):
    raw = builders.raw_config("qwen3_5_text")
    tensors = builders.make_tensors(raw)
    kept = {name: v for name, v in tensors.items() if "layers.2." not in name}
    error = refusal(tmp_path, kept, raw)
    assert "and 9 more" in str(error)
    assert str(error).count("`model.layers.2.") == 6  # Five, and the first again.


@pytest.mark.usefixtures("forbid_reading")
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.linear_attn.in_proj_qkvz.weight",
        "model.layers.0.mlp.experts.1.down_proj.weight",
    ],
)
def test_part_stored_in_two_forms_is_refused(tmp_path, name):
    raw = builders.raw_config("qwen3_5_moe_text")
    tensors = builders.make_tensors(raw)
    tensors[name] = builders.make_tensors(raw, fused=True)[name]
    assert "two forms" in str(refusal(tmp_path, tensors, raw))


@pytest.mark.usefixtures("forbid_reading")
def test_mlx_exports_are_refused_by_their_conv_layout(tmp_path):
    raw = builders.raw_config("qwen3_5")
    tensors = builders.make_tensors(raw, prefix="language_model.model.")
    for name, values in tensors.items():
        if "conv1d" in name:
            tensors[name] = values.swapaxes(1, 2)
    error = refusal(tmp_path, tensors, raw)
    assert error.expected == (builders.CHANNELS, 1, builders.CONV_TAPS)


WEIGHT = "model.layers.3.self_attn.k_proj.weight"
STEM = WEIGHT.removesuffix("weight")
ZEROS = np.zeros((builders.KV_HEADS * builders.HEAD_DIM, builders.HIDDEN), np.float32)
SCALE = np.ones((1, 1), np.float32)
FP8 = ZEROS.astype(jnp.float8_e4m3fn)

PACKED = {
    "compressed-tensors": (
        {STEM + "weight_packed": ZEROS.astype(np.int32), STEM + "weight_scale": SCALE},
        STEM + "weight_packed",
    ),
    "gptq": ({STEM + "qweight": ZEROS.astype(np.int32)}, STEM + "qweight"),
    "mlx": (
        {WEIGHT: ZEROS.astype(np.uint32), STEM + "scales": SCALE},
        STEM + "scales",
    ),
    "int8": ({WEIGHT: ZEROS.astype(np.int8)}, WEIGHT),
    "float64": ({WEIGHT: ZEROS.astype(np.float64)}, WEIGHT),
    "float8 with no scale": ({WEIGHT: FP8}, WEIGHT),
    "float8 per tensor": (
        {WEIGHT: FP8, STEM + "weight_scale": SCALE[0]},
        STEM + "weight_scale",
    ),
    "float8_e5m2": (
        {WEIGHT: ZEROS.astype(jnp.float8_e5m2), WEIGHT + "_scale_inv": SCALE},
        WEIGHT,
    ),
    "integer scale": (
        {WEIGHT: FP8, WEIGHT + "_scale_inv": SCALE.astype(np.int32)},
        WEIGHT + "_scale_inv",
    ),
}


@pytest.mark.usefixtures("forbid_reading")
@pytest.mark.parametrize("case", PACKED)
def test_packed_weight_is_refused_by_name(tmp_path, case):
    packed, name = PACKED[case]
    raw = builders.raw_config("qwen3_5_text")
    tensors = builders.make_tensors(raw)
    del tensors[WEIGHT]
    error = refusal(tmp_path, tensors | packed, raw)
    assert "not supported" in str(error)
    assert error.tensor == name


@pytest.mark.usefixtures("forbid_reading")
@pytest.mark.parametrize("name", ["conv1d.weight", "dt_bias"])
def test_only_matrices_may_be_float8(tmp_path, name):
    raw = builders.raw_config("qwen3_5_text")
    tensors = builders.make_tensors(raw)
    name = "model.layers.0.linear_attn." + name
    tensors[name] = tensors[name].astype(jnp.float8_e4m3fn)
    tensors[name + "_scale_inv"] = SCALE
    assert refusal(tmp_path, tensors, raw).tensor == name


@pytest.mark.usefixtures("forbid_reading")
def test_scales_of_another_block_size_are_refused(tmp_path):
    raw = builders.raw_config("qwen3_5_text")
    tensors = builders.make_tensors(raw)
    tensors[WEIGHT] = FP8
    tensors[WEIGHT + "_scale_inv"] = np.ones((2, 1), np.float32)
    error = refusal(tmp_path, tensors, raw)
    assert error.tensor == WEIGHT + "_scale_inv"
    assert (error.expected, error.found) == ((1, 1), (2, 1))


@pytest.mark.usefixtures("forbid_reading")
def test_scale_beside_a_plain_weight_is_unused(tmp_path):
    raw = builders.raw_config("qwen3_5_text")
    tensors = builders.make_tensors(raw)
    tensors[WEIGHT + "_scale_inv"] = SCALE
    assert "unused" in str(refusal(tmp_path, tensors, raw))


HOSTILE = {
    "layers": ({"num_hidden_layers": 9_999}, "fewer tensors"),
    "experts": ({"num_experts": 2**50}, "experts.gate_up_proj"),
    "key heads": (
        {"linear_num_key_heads": 2**50, "linear_num_value_heads": 2**50},
        "linear_attn",
    ),
    "vocabulary": ({"vocab_size": 2**50}, "embed_tokens"),
}


@pytest.mark.usefixtures("forbid_reading")
@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text"])
def test_config_of_any_size_is_refused_quickly(tmp_path, case, model_type):
    overrides, problem = HOSTILE[case]
    raw = builders.raw_config(model_type)
    tensors = builders.make_tensors(raw)
    raw |= overrides
    if case == "experts" and model_type == "qwen3_next":
        problem = "missing `model.layers.0.mlp.experts.gate_up_proj`"
    assert problem in str(refusal(tmp_path, tensors, raw))


@pytest.mark.usefixtures("forbid_reading")
def test_checkpoint_of_another_model_is_refused(tmp_path):
    raw = builders.raw_config("qwen3_next")
    tensors = {f"transformer.h.{i}.attn.weight": ZEROS for i in range(9)}
    error = refusal(tmp_path, tensors, raw)
    assert "no decoder layers" in str(error)
    assert "`model.language_model.layers.*`" in str(error)


def quantise(values: np.ndarray, rng: np.random.Generator):
    """Returns float8 values, their block scales, and the values that they stand for."""
    rows, columns = (-(-size // 128) for size in values.shape[-2:])
    shape = (*values.shape[:-2], rows, columns)
    scale = rng.uniform(0.5, 2, shape).astype(jnp.bfloat16)
    spread = scale.astype(np.float32).repeat(128, axis=-2).repeat(128, axis=-1)
    spread = spread[..., : values.shape[-2], : values.shape[-1]]
    packed = (values.astype(np.float32) / spread).astype(jnp.float8_e4m3fn)
    return packed, scale, packed.astype(np.float32) * spread


# What each published export leaves plain; its config may say so or not.
EXPORTS = {
    "all but mtp": (
        r"(?<!mtp).*(proj|in_proj_\w+)\.weight|gate_up_proj|down_proj",
        "x",
    ),
    "experts only": (r"mlp\.experts\.", None),
    "nothing": (r"(?!)", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "config says int4": (r"o_proj", {"quant_method": "gptq", "bits": 4}),
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("export", EXPORTS)
def test_float8_is_decided_tensor_by_tensor(tmp_path, export, fused):
    pattern, quantization_config = EXPORTS[export]
    raw = builders.raw_config("qwen3_5_moe")
    raw["quantization_config"] = quantization_config
    tensors = builders.make_tensors(raw, fused=fused)
    rng = np.random.default_rng(0)
    plain = dict(tensors)
    for name in plain:
        is_matrix = plain[name].ndim > 1 and "conv1d" not in name
        if is_matrix and re.search(pattern, name) and "mtp" not in name:
            packed, scale, plain[name] = quantise(plain[name], rng)
            tensors |= {name: packed, name + "_scale_inv": scale}
    assert (len(tensors) > len(plain)) == (export != "nothing")
    params = write_and_load(tmp_path, tensors, raw, with_mtp=True)
    expected = builders.expected_params(plain, raw, dtype=BFLOAT16, with_mtp=True)
    assert_equal(params, expected)


def test_tied_head_may_be_absent_or_equal(tmp_path):
    raw = builders.raw_config("qwen3_5", tie_word_embeddings=True)
    tensors = builders.make_tensors(raw)
    expected = builders.expected_params(tensors, raw, dtype=BFLOAT16)
    params = write_and_load(tmp_path / "absent", tensors, raw)
    assert params.lm_head is None
    assert_equal(params, expected)
    name = "model.language_model.embed_tokens.weight"
    tensors["lm_head.weight"] = tensors[name].copy()
    assert_equal(write_and_load(tmp_path / "equal", tensors, raw), expected)


@pytest.mark.parametrize("change", ["value", "dtype", "shape"])
def test_tied_head_that_differs_is_refused(tmp_path, change):
    raw = builders.raw_config("qwen3_5", tie_word_embeddings=True)
    tensors = builders.make_tensors(raw)
    head = tensors["model.language_model.embed_tokens.weight"].copy()
    if change == "value":
        head[-1, -1] += 1
    head = head.astype(np.float32) if change == "dtype" else head
    tensors["lm_head.weight"] = head[1:] if change == "shape" else head
    error = refusal(tmp_path, tensors, raw)
    assert "tie_word_embeddings" in str(error)
    assert error.tensor == "lm_head.weight"


def poisoned(
    tensors: builders.Tensors, name: str, index: tuple[int, ...], value: float
):
    values = tensors[name].copy()
    values[index] = value
    return tensors | {name: values}


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("model.embed_tokens.weight", (95, 31), np.nan),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", (77, 5), np.inf),
        ("model.layers.1.linear_attn.conv1d.weight", (9, 0, 2), -np.inf),
        ("model.layers.2.linear_attn.A_log", (3,), np.nan),
        ("model.layers.3.mlp.experts.2.up_proj.weight", (23, 1), np.inf),
    ],
)
def test_non_finite_value_is_located_when_asked(tmp_path, name, index, value):
    raw = builders.raw_config("qwen3_next")
    tensors = poisoned(builders.make_tensors(raw), name, index, value)
    builders.write_checkpoint(tmp_path, tensors, raw)
    load(tmp_path)
    with pytest.raises(CheckpointError, match="not finite") as raised:
        load(tmp_path, check_finite=True)
    assert raised.value.tensor == name
    assert str(list(index)) in str(raised.value)
    assert raised.value.file == str(tmp_path / "model.safetensors")


def test_finite_checkpoint_passes_and_unloaded_parts_do_not_matter(tmp_path):
    raw = builders.raw_config("qwen3_5")
    tensors = builders.make_tensors(raw, with_vision=True)
    tensors = poisoned(tensors, "mtp.fc.weight", (0, 0), np.nan)
    tensors = poisoned(tensors, "visual.blocks.0.attn.qkv.bias", (0,), np.nan)
    write_and_load(tmp_path, tensors, raw, check_finite=True)
    with pytest.raises(CheckpointError, match="mtp.fc.weight"):
        load(tmp_path, check_finite=True, with_mtp=True)


def test_value_beyond_float16_is_refused_unasked(tmp_path):
    raw = builders.raw_config("qwen3_5_text")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = poisoned(builders.make_tensors(raw), name, (3, 4), 1e6)
    builders.write_checkpoint(tmp_path, tensors, raw)
    load(tmp_path)
    with pytest.raises(CheckpointError, match=r"\[3, 4\] is not finite in float16"):
        load(tmp_path, dtype=jnp.dtype(jnp.float16))


def test_progress_counts_every_byte_once(tmp_path):
    raw = builders.raw_config("qwen3_5_moe_text")
    tensors = builders.make_tensors(raw)
    calls = []
    builders.write_checkpoint(tmp_path, tensors, raw)
    params = load(tmp_path, progress=lambda *call: calls.append(call))
    loaded_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    done = [call[0] for call in calls]
    assert done == sorted(done) and (done[0], done[-1]) == (0, loaded_bytes)
    assert {total for _, total, _ in calls} == {loaded_bytes}
    names = [name for _, _, name in calls]
    assert len(names) == len(set(names)) == 1 + len(jax.tree.leaves(params))
    assert "layers[0].mixer.in_proj_qkv" in names


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, np.float64])
def test_unloadable_dtype_is_refused(tmp_path, dtype):
    raw = builders.raw_config("qwen3_5_text")
    with pytest.raises(ValueError, match="`dtype` must be one of bfloat16"):
        write_and_load(
            tmp_path, builders.make_tensors(raw), raw, dtype=jnp.dtype(dtype)
        )


@pytest.fixture(scope="module")
def sound_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    raw = builders.raw_config("qwen3_5_moe", num_hidden_layers=1)
    builders.write_checkpoint(folder, builders.make_tensors(raw), raw, num_files=2)
    return folder


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_damaged_checkpoint_loads_or_is_refused(sound_folder, data):
    names = sorted(path.name for path in sound_folder.iterdir())
    name = data.draw(st.sampled_from(names))
    content = bytearray((sound_folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        # Of the weights, mostly the header; of the rest, anywhere.
        place = data.draw(st.integers(0, min(len(content), 9000)))
        replacement = data.draw(st.binary(max_size=3))
        content[place : place + 2] = replacement
    with tempfile.TemporaryDirectory() as folder:
        for other in names:
            (pathlib.Path(folder) / other).symlink_to(sound_folder / other)
        (pathlib.Path(folder) / name).unlink()
        (pathlib.Path(folder) / name).write_bytes(content)
        try:
            load(pathlib.Path(folder))
        except (CheckpointError, NotImplementedError) as error:
            assert str(error).isprintable()


# ----- shards


def shard_tree(specs, mesh, choose):
    def leaf(spec):
        parts = [None] * len(spec.shape)
        for axis, name in choose(spec):
            size = np.prod([mesh.shape[n] for n in np.atleast_1d(name)])
            assert spec.shape[axis] % size == 0
            parts[axis] = name
        return jax.NamedSharding(mesh, jax.P(*parts))

    return jax.tree.map(leaf, specs)


def rows_and_columns(spec):
    """Splits the last axis in two over "y", and the first in two over "x" if it can."""
    chosen = [(len(spec.shape) - 1, "y")]
    if len(spec.shape) > 1 and spec.shape[0] % 2 == 0:
        chosen.append((0, "x"))
    return chosen


LAYOUTS = {
    "replicated": lambda spec: [],
    "rows": lambda spec: [(0, "x")] if spec.shape[0] % 2 == 0 else [],
    "columns": lambda spec: [(len(spec.shape) - 1, ("x", "y"))],
    "both": rows_and_columns,
}


class CountingReader(reading.TensorReader):
    """Remembers the readers that were made."""

    made: list["CountingReader"] = []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made.append(self)


@pytest.mark.parametrize(
    ("layout_name", "fused"),
    [("replicated", False), ("rows", True), ("columns", False)]
    + [("both", True), ("both", False)],
)
def test_shards_hold_their_part_and_are_read_once(
    tmp_path, monkeypatch, layout_name, fused
):
    monkeypatch.setattr(reading, "TensorReader", CountingReader)
    monkeypatch.setattr(reading, "_MERGE_GAP_BYTES", 0)
    CountingReader.made.clear()
    raw = builders.raw_config("qwen3_5_moe")
    tensors = builders.make_tensors(raw, fused=fused)
    builders.write_checkpoint(tmp_path, tensors, raw)
    config, _ = checkpoint.read_config(tmp_path)
    specs = params_lib.describe_params(config, dtype=BFLOAT16, with_mtp=True)
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"))
    shardings = shard_tree(specs, mesh, LAYOUTS[layout_name])
    calls = []
    params = load(
        tmp_path,
        shardings=shardings,
        with_mtp=True,
        progress=lambda *call: calls.append(call),
    )
    expected = builders.expected_params(tensors, raw, dtype=BFLOAT16, with_mtp=True)
    assert_equal(params, expected)
    jax.tree.map(
        lambda array, sharding: (
            array.sharding.is_equivalent_to(sharding, array.ndim)
            or pytest.fail(f"{array.sharding} is not {sharding}")
        ),
        params,
        shardings,
    )
    # Each byte of each loaded tensor, once, though eight devices hold copies.
    (reader,) = CountingReader.made
    assert reader.bytes_read == sum(values.nbytes for values in tensors.values())
    loaded_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(expected))
    assert calls[-1][:2] == (loaded_bytes, loaded_bytes)


def test_one_shard_reads_only_its_own_bytes(tmp_path):
    name, values = "w", np.arange(64 * 4096, dtype=np.float32).reshape(64, 4096)
    builders.write_tensors(tmp_path / "model.safetensors", {name: values})
    stored = inventory.scan(tmp_path)
    form = layout.Whole(name, values.shape, values.shape)
    for start, size in [((16, 0), (16, 4096)), ((0, 1024), (64, 1024))]:
        out = reading.empty_aligned(size, FLOAT32)
        with reading.TensorReader(stored) as reader:
            reader.fill(out, form, start)
        box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        np.testing.assert_array_equal(out, values[box])
        assert reader.bytes_read == out.nbytes == values.nbytes // 4


def test_shardings_must_fit_the_parameters(tmp_path):
    raw = builders.raw_config("qwen3_5_text")
    builders.write_checkpoint(tmp_path, builders.make_tensors(raw), raw)
    config, _ = checkpoint.read_config(tmp_path)
    specs = params_lib.describe_params(config, dtype=BFLOAT16, with_mtp=True)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(TypeError, match="structure"):
        load(tmp_path, shardings=jax.tree.map(lambda _: one, specs))
    with pytest.raises(TypeError, match="shardings as leaves"):
        load(tmp_path, shardings=specs, with_mtp=True)


# ----- memory

# Prints how far loading raised the peak of resident memory, and what it loaded.
_MEASURE_PEAK = """
import sys
import jax
import jax.numpy as jnp
from metrale_jax import checkpoint

def resident_bytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

folder, dtype = sys.argv[1:]
jax.devices()
config, _ = checkpoint.read_config(folder)
before = resident_bytes("VmRSS")
params = checkpoint.load_params(folder, config, dtype=jnp.dtype(dtype))
loaded = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(resident_bytes("VmHWM") - before, loaded)
"""


def write_zeros(folder: pathlib.Path, raw: dict[str, Any]) -> None:
    """Writes a checkpoint of zeros as a sparse file, which costs no time or disk."""
    (folder / "config.json").write_text(json.dumps(raw))
    config, _ = checkpoint.read_config(folder)
    specs = params_lib.describe_params(config, dtype=BFLOAT16)
    forms = layout.describe_layout(config, specs, layout.FLAT_PREFIX)
    header, position = {}, 0
    for known in jax.tree.leaves(forms):
        for name, shape in known.published.tensors().items():
            end = position + 2 * int(np.prod(shape))
            header[name] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [position, end],
            }
            position = end
    with (folder / "model.safetensors").open("wb") as file:
        file.write(builders.raw_file(header))
        file.truncate(file.tell() + position)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_loading_holds_little_more_than_what_it_loads(tmp_path):
    # About 190 million parameters in 8 layers.
    raw = builders.raw_config("qwen3_5_text", hidden_size=1024, intermediate_size=6144)
    raw |= {"num_hidden_layers": 8, "vocab_size": 1024, "linear_num_key_heads": 16}
    raw |= {"linear_num_value_heads": 16, "linear_key_head_dim": 64}
    raw |= {"linear_value_head_dim": 64}
    write_zeros(tmp_path, raw)
    command = [sys.executable, "-c", _MEASURE_PEAK, str(tmp_path), "float32"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak, loaded = map(int, output.split())
    assert loaded > 600e6
    # A copy of a parameter, mapped pages or kept temporaries would each break this.
    assert peak < 1.02 * loaded + 32e6

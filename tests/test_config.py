"""config.json: each published spelling gives the same target; errors name the field."""

import copy
import dataclasses
import json
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from checkpoint import builders, published
from metrale_jax import checkpoint
from metrale_jax import config as config_lib
from metrale_jax.checkpoint import CheckpointError
from metrale_jax.config import parse_model_config


def with_text(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns a copy with fields of the text model changed; `...` removes one."""
    raw = copy.deepcopy(raw)
    text = raw.get("text_config", raw)
    text.update(changes)
    for key in [key for key, value in changes.items() if value is ...]:
        del text[key]
    return raw


def test_published_qwen3_5_27b():
    config = parse_model_config(
        published.qwen3_5_27b(), {"eos_token_id": [248046, 248044]}
    )
    assert config == config_lib.ModelConfig(
        model_type="qwen3_5",
        vocab_size=248320,
        hidden_size=5120,
        layers=tuple(published.layer_types(64)),
        attention=config_lib.AttentionConfig(
            num_heads=24, num_kv_heads=4, head_dim=256, rotary_dim=64, rope_theta=1e7
        ),
        delta_net=config_lib.DeltaNetConfig(
            num_key_heads=16,
            num_value_heads=48,
            key_head_dim=128,
            value_head_dim=128,
            conv_kernel_size=4,
            output_gate="silu",
        ),
        moe=None,
        moe_layers=(),
        ffn_size=17408,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position=262144,
        end_token_ids=(248046, 248044),
        num_mtp_layers=1,
    )
    assert config.delta_net.conv_channels == 10240
    assert config.layers.count("full_attention") == 16


def test_published_qwen3_next_80b():
    config = parse_model_config(published.qwen3_next_80b_a3b())
    assert config.moe == config_lib.MoEConfig(
        num_experts=512,
        num_experts_per_token=10,
        expert_ffn_size=512,
        shared_expert_ffn_size=512,
        normalize_top_k=True,
    )
    assert config.moe_layers == tuple(range(48))
    assert config.layers == tuple(published.layer_types(48))
    assert (config.attention.rope_theta, config.attention.rotary_dim) == (1e7, 64)
    assert (config.vocab_size, config.ffn_size) == (151936, 0)
    assert config.end_token_ids == (151645,)
    # No field announces Next's head, but every published checkpoint has one.
    assert config.num_mtp_layers == 1


def test_published_qwen3_5_0_8b_and_35b():
    small = parse_model_config(published.qwen3_5_0_8b())
    assert small.tie_word_embeddings and small.moe is None
    assert small.delta_net.conv_channels == 6144
    large = parse_model_config(published.qwen3_5_35b_a3b())
    assert large.moe is not None
    assert (large.moe.num_experts, large.moe.num_experts_per_token) == (256, 8)
    assert large.delta_net.conv_channels == 8192


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1),
        ({"mtp_num_hidden_layers": 0}, 0),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 0}, 0),
    ],
)
def test_mtp_head_of_next_can_be_denied(fields, expected):
    raw = published.qwen3_next_80b_a3b() | fields
    assert parse_model_config(raw).num_mtp_layers == expected


def test_other_families_have_no_head_unless_they_say_so():
    raw = with_text(published.qwen3_5_27b(), mtp_num_hidden_layers=...)
    assert parse_model_config(raw).num_mtp_layers == 0


@pytest.mark.parametrize("make", [published.qwen3_5_27b, published.qwen3_5_35b_a3b])
def test_flat_file_means_the_same_as_a_nested_one(make):
    nested = make()
    flat = nested["text_config"]
    config = parse_model_config(flat)
    assert flat["model_type"].endswith("_text")
    assert config == dataclasses.replace(
        parse_model_config(nested), model_type=flat["model_type"]
    )


def test_outer_tie_counts_when_the_text_model_is_silent():
    raw = with_text(published.qwen3_5_27b(), tie_word_embeddings=...)
    assert not parse_model_config(raw).tie_word_embeddings
    raw["tie_word_embeddings"] = True
    assert parse_model_config(raw).tie_word_embeddings
    raw["text_config"]["tie_word_embeddings"] = False
    assert not parse_model_config(raw).tie_word_embeddings


def test_layers_by_list_or_by_interval():
    raw = published.qwen3_5_27b()
    expected = parse_model_config(raw).layers
    assert parse_model_config(with_text(raw, layer_types=...)).layers == expected
    neither = with_text(raw, layer_types=..., full_attention_interval=...)
    assert parse_model_config(neither).layers == expected
    halves = with_text(raw, layer_types=..., full_attention_interval=2)
    assert parse_model_config(halves).layers.count("full_attention") == 32
    reversed_kinds = published.layer_types(64)[::-1]
    mixed = with_text(raw, layer_types=reversed_kinds)
    assert parse_model_config(mixed).layers == tuple(reversed_kinds)


ROPE_SPELLINGS = [
    {"rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}},
    {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
    {"rope_theta": 5e6, "partial_rotary_factor": 0.5, "rope_scaling": None},
    {
        "rope_theta": 5000000,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "mrope", "mrope_section": [11, 11, 10]},
    },
    {
        "rope_theta": 1.0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000,
            "partial_rotary_factor": 0.5,
        },
    },
]


@pytest.mark.parametrize("rope", ROPE_SPELLINGS)
def test_rope_in_either_spelling(rope):
    raw = with_text(published.qwen3_5_27b(), rope_parameters=...)
    raw = with_text(raw, partial_rotary_factor=...)
    attention = parse_model_config(with_text(raw, **rope)).attention
    assert (attention.rope_theta, attention.rotary_dim) == (5e6, 128)


@pytest.mark.parametrize(
    ("of_config", "of_generation", "expected"),
    [
        (7, ..., (7,)),
        ([7, 8], ..., (7, 8)),
        (..., ..., ()),
        (None, None, ()),
        (7, 8, (8, 7)),
        (7, [8, 7], (8, 7)),
        ([], [], ()),
        (0, ..., (0,)),
        (..., [95], (95,)),
    ],
)
def test_end_tokens_of_both_files_count(of_config, of_generation, expected):
    raw = with_text(builders.raw_config("qwen3_5"), eos_token_id=of_config)
    generation = {} if of_generation is ... else {"eos_token_id": of_generation}
    assert parse_model_config(raw, generation).end_token_ids == expected


@pytest.mark.parametrize("token", [96, -1, [7, 96], "7", 7.0, True, {"a": 1}, [[7]]])
@pytest.mark.parametrize("is_generation", [True, False], ids=["generation", "config"])
def test_bad_end_token_is_an_error(token, is_generation):
    raw = builders.raw_config("qwen3_5_text")
    generation = {"eos_token_id": token} if is_generation else {}
    raw = raw if is_generation else raw | {"eos_token_id": token}
    with pytest.raises(ValueError, match="`eos_token_id`"):
        parse_model_config(raw, generation)


@pytest.mark.parametrize(
    ("model_type", "nearest"),
    [
        ("qwen3_5_mo", "qwen3_5_moe"),
        ("qwen3_6", "qwen3_5"),
        ("qwen3_nxt", "qwen3_next"),
        ("llama", ""),
        (None, ""),
        (7, ""),
        (["qwen3_5"], ""),
        ("x" * 10**6, ""),
    ],
    ids=lambda value: str(value)[:20],
)
def test_unknown_model_type_names_the_nearest(model_type, nearest):
    raw = builders.raw_config("qwen3_5") | {"model_type": model_type}
    with pytest.raises(NotImplementedError) as raised:
        parse_model_config(raw)
    message = str(raised.value)
    assert all(name in message for name in config_lib.SUPPORTED_MODEL_TYPES)
    assert f"(nearest: {nearest}" in message
    assert len(message) < 500


UNSUPPORTED = [
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("attn_output_gate", False),
    ("mtp_use_dedicated_embeddings", True),
    ("mtp_num_hidden_layers", 2),
    ("output_gate_type", "relu"),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED)
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_text"])
def test_unsupported_setting_is_named(model_type, field, value):
    raw = with_text(builders.raw_config(model_type), **{field: value})
    with pytest.raises(NotImplementedError, match=field):
        parse_model_config(raw)


REQUIRED = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
]


@pytest.mark.parametrize("field", [*REQUIRED, "intermediate_size"])
@pytest.mark.parametrize("value", [..., None, "32", 32.0, True, 0, -1, 2**60, [32]])
def test_missing_or_mistyped_field_is_named(field, value):
    raw = with_text(builders.raw_config("qwen3_5"), **{field: value})
    with pytest.raises(ValueError, match=rf"`({field}|ffn_size|num_\w+)`"):
        parse_model_config(raw)


BAD_VALUES = [
    ("layer_types", ["linear_attention"] * 3),
    ("layer_types", ["linear_attention"] * 3 + ["sliding_attention"]),
    ("layer_types", [["linear_attention"]] * 4),
    ("layer_types", "linear_attention"),
    ("full_attention_interval", 0),
    ("mlp_only_layers", 3),
    ("decoder_sparse_step", 0),
    ("num_experts_per_tok", 5),
    ("num_experts", -4),
    ("norm_topk_prob", "yes"),
    ("num_hidden_layers", 10**9),
    ("rms_norm_eps", "1e-6"),
    ("rope_theta", 10**400),
    ("rope_theta", -1.0),
    ("rope_theta", float("inf")),
    ("partial_rotary_factor", 0.0),
    ("partial_rotary_factor", 1e300),
    ("partial_rotary_factor", 1.5),
    ("partial_rotary_factor", 0.2),
    ("rope_parameters", [1]),
    ("tie_word_embeddings", 1),
    ("linear_conv_kernel_dim", 1),
    ("num_key_value_heads", 3),
    ("linear_num_value_heads", 3),
    ("text_config", "flat"),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_contradictory_value_is_an_error(field, value):
    raw = builders.raw_config("qwen3_next") | {field: value}
    with pytest.raises(ValueError):
        parse_model_config(raw)


def test_expert_layers_follow_step_and_exceptions():
    raw = builders.raw_config("qwen3_next")
    assert parse_model_config(raw).moe_layers == (0, 1, 2, 3)
    assert parse_model_config(raw | {"decoder_sparse_step": 2}).moe_layers == (1, 3)
    some = parse_model_config(raw | {"mlp_only_layers": [0, 2]})
    assert (some.moe_layers, some.ffn_size) == ((1, 3), builders.FFN)


def test_only_next_may_skip_renormalisation():
    for model_type, expected in [("qwen3_next", False), ("qwen3_5_moe_text", True)]:
        raw = builders.raw_config(model_type) | {"norm_topk_prob": False}
        moe = parse_model_config(raw).moe
        assert moe is not None and moe.normalize_top_k == expected


@pytest.mark.parametrize("model_type", builders.MODEL_TYPES)
def test_config_is_a_static_argument(model_type):
    config = parse_model_config(builders.raw_config(model_type))
    again = parse_model_config(builders.raw_config(model_type))
    assert config == again and hash(config) == hash(again)


# ----- files


def write(folder, config: bytes | dict, generation: bytes | dict | None = None):
    for name, value in [("config", config), ("generation_config", generation)]:
        if value is not None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            (folder / f"{name}.json").write_bytes(data)
    return folder


def test_read_config_returns_both_views(tmp_path):
    raw = builders.raw_config("qwen3_5_moe")
    generation = {"eos_token_id": [9, 7], "temperature": 0.6}
    config, read = checkpoint.read_config(write(tmp_path, raw, generation))
    assert read == raw
    assert config == parse_model_config(raw, generation)
    assert config.end_token_ids == (9, 7)
    assert checkpoint.read_generation_config(tmp_path) == generation


def test_generation_config_is_optional(tmp_path):
    config, _ = checkpoint.read_config(write(tmp_path, builders.raw_config("qwen3_5")))
    assert config.end_token_ids == (7,)
    assert checkpoint.read_generation_config(tmp_path) == {}


BAD_FILES = {
    "empty": (b"", None),
    "list": (b"[]", None),
    "nan": (b'{"rms_norm_eps": NaN}', None),
    "twice": (b'{"model_type": "qwen3_5", "model_type": "qwen3_next"}', None),
    "nested twice": (b'{"text_config": {"a": 1, "a": 1}}', None),
    "utf-16": ('{"a": 1}'.encode("utf-16"), None),
    "generation": (builders.raw_config("qwen3_5"), b'{"eos_token_id": 7'),
    "generation twice": (
        builders.raw_config("qwen3_5"),
        b'{"eos_token_id": 7, "eos_token_id": 8}',
    ),
    "field": (builders.raw_config("qwen3_5_text") | {"vocab_size": "many"}, None),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_refused_by_name(tmp_path, case):
    with pytest.raises(CheckpointError) as raised:
        checkpoint.read_config(write(tmp_path, *BAD_FILES[case]))
    name = "generation_config" if "generation" in case else "config"
    assert raised.value.file == str(tmp_path / f"{name}.json")
    assert str(raised.value).isprintable()


FIELDS = sorted(
    {*builders.raw_config("qwen3_next"), *builders.raw_config("qwen3_5_moe_text")}
    | {"text_config", "layer_types", "rope_scaling", "output_gate_type"}
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([2**53, 2**70, 10**400, 0.25, 1e308, -0.0])
    | st.sampled_from(["", "default", "linear_attention", "silu"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*FIELDS, "rope_type", "type"]), inner)
    ),
    max_leaves=6,
)


@hypothesis.given(
    model_type=st.sampled_from(builders.MODEL_TYPES),
    changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=4),
    generation=st.dictionaries(st.just("eos_token_id"), VALUES),
)
def test_any_config_is_parsed_or_refused(model_type, changes, generation):
    raw = with_text(builders.raw_config(model_type), **changes)
    try:
        config = parse_model_config(raw, generation)
    except (ValueError, NotImplementedError):
        return
    hash(config)

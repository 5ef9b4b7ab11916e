"""Tiny random targets and short-hands that the core's tests share."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from metrale_jax import config as config_lib
from metrale_jax import sampling, state, steps
from metrale_jax.axes import Array
from metrale_jax.drafters import protocol
from metrale_jax.model import params as params_lib
from pallas_kernels import gated_delta

VOCAB_SIZE = 128

_COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=12,
    max_position_embeddings=256,
)

RAW_DENSE = _COMMON | dict(model_type="qwen3_5_text", intermediate_size=96)
DENSE = config_lib.parse_model_config(RAW_DENSE)
MOE = config_lib.parse_model_config(
    _COMMON
    | dict(
        model_type="qwen3_5_moe_text",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    )
)
CONFIGS = {"dense": DENSE, "moe": MOE}
# Products of fewer columns give a row the same bits alone and among others.
WIDE = config_lib.parse_model_config(
    RAW_DENSE
    | dict(
        hidden_size=512,
        intermediate_size=640,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )
)

NUM_SLOTS = 3
MAX_DRAFTS = 3
PAGE_SIZE = 8
# Prompts are padded to chunks of this many tokens.
CHUNK_LENGTH = 16
MAX_LENGTH = 64


def make_params(
    config: config_lib.ModelConfig, seed: int = 0
) -> params_lib.ModelParams:
    return params_lib.init_params(config, rng_key=jax.random.key(seed))


def make_state(
    config: config_lib.ModelConfig,
    drafter: protocol.Drafter | None = None,
    dtype: str = "float32",
) -> state.SequenceState:
    """Every test uses one shape, so that a target's steps compile once in a session."""
    return state.init_state(config, DECODE, dtype=jnp.dtype(dtype), drafter=drafter)


DECODE = config_lib.for_slots(
    NUM_SLOTS, MAX_LENGTH, page_size=PAGE_SIZE, max_drafts=MAX_DRAFTS
)


def make_request(
    config: config_lib.ModelConfig, slot: int, **options: Any
) -> state.SlotRequest:
    """A request for a slot that owns the slot-th run of pages."""
    length_limit = options.pop("length_limit", None)
    return state.make_request(
        config,
        DECODE,
        slot=slot,
        length_limit=length_limit,
        options=sampling.SamplingOptions(**options),
    )


def start(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    sequences: state.SequenceState,
    slot: int,
    prompt: Sequence[int],
    chunks: Sequence[int] | None = None,
    drafter: protocol.Drafter | None = None,
    **options: Any,
) -> state.SequenceState:
    """Inserts a request into a slot and prefills its prompt in the given chunks.

    The options are `length_limit` and those of `sampling.SamplingOptions`.
    """
    request = make_request(config, slot, **options)
    sequences = steps.insert(sequences, jnp.int32(slot), request)
    if chunks is None:
        chunks = [
            len(prompt[begin : begin + CHUNK_LENGTH])
            for begin in range(0, len(prompt), CHUNK_LENGTH)
        ]
    assert sum(chunks) == len(prompt), f"{chunks=} {len(prompt)=}"
    done = 0
    for size in chunks:
        done += size
        chunk = [*prompt[done - size : done], *[0] * (CHUNK_LENGTH - size)]
        sequences, _ = steps.prefill(
            params,
            sequences,
            jnp.array([slot], jnp.int32),
            jnp.array([chunk], jnp.int32),
            jnp.array([size], jnp.int32),
            jnp.array([done == len(prompt)]),
            drafter,
            config=config,
        )
    return sequences


def output_tokens(
    sequences: state.SequenceState, slot: int, prompt_length: int
) -> list[int]:
    """The tokens that a slot has emitted so far."""
    end = int(sequences.length[slot]) + 1
    return np.asarray(sequences.tokens)[slot, prompt_length:end].tolist()


def decode(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    sequences: state.SequenceState,
    num_rounds: int,
) -> state.SequenceState:
    for _ in range(num_rounds):
        sequences, _ = steps.decode_round(params, sequences, config=config)
    return sequences


def slot_values(
    sequences: state.SequenceState, config: config_lib.ModelConfig, slot: int
) -> dict[str, np.ndarray]:
    """Everything of a slot that counts, folded and cut to its length, by name.

    Pending rows are folded in numpy. `fold_pending` before this leaves it none, which
    compares bits: numpy rounds a product before it adds, compiled code may not.
    """
    length = int(sequences.length[slot])
    values = {
        "length": np.asarray(sequences.length[slot]),
        "last_token": np.asarray(sequences.last_token[slot]),
        "tokens": np.asarray(sequences.tokens[slot, : length + 1]),
        "hidden": np.asarray(sequences.hidden[slot]),
    }
    for index, layer in enumerate(sequences.layers):
        match layer:
            case state.KVCache():
                values |= _committed_rows(sequences, layer, slot, f"{index}")
            case state.RecurrentState():
                values[f"{index}.matrix"] = fold_by_hand(sequences, layer, slot)
                values[f"{index}.conv_state"] = np.asarray(layer.conv_state[slot])
    for path, node in jax.tree.leaves_with_path(
        sequences.drafter, is_leaf=lambda node: isinstance(node, state.KVCache)
    ):
        name = f"drafter{jax.tree_util.keystr(path)}"
        if isinstance(node, state.KVCache):
            values |= _committed_rows(sequences, node, slot, name)
        elif jnp.issubdtype(node.dtype, jnp.floating):
            # Integers count rounds, of which plain decoding has more.
            values[name] = np.asarray(node[slot])
    return values


@jax.jit
def fold_pending(sequences: state.SequenceState) -> state.SequenceState:
    """Folds the pending rows by the reference recurrence."""

    def fold(layer: state.LayerState) -> state.LayerState:
        if isinstance(layer, state.KVCache):
            return layer
        matrix = gated_delta.fold(
            layer.recurrent_state,
            layer.pending,
            sequences.num_pending,
            implementation="reference",
        )
        return layer.replace(recurrent_state=matrix)

    return sequences.replace(
        num_pending=jnp.zeros_like(sequences.num_pending),
        layers=tuple(map(fold, sequences.layers)),
    )


def _committed_rows(
    sequences: state.SequenceState, cache: state.KVCache, slot: int, name: str
) -> dict[str, np.ndarray]:
    length = int(sequences.length[slot])
    pages = np.asarray(sequences.page_table[slot])
    values = {}
    for part in ("keys", "values"):
        paged = np.asarray(getattr(cache, part))
        rows = paged[pages[pages < paged.shape[0]]].reshape(-1, *paged.shape[2:])
        values[f"{name}.{part}"] = rows[:length]
    return values


def fold_by_hand(
    sequences: state.SequenceState, layer: state.RecurrentState, slot: int
) -> np.ndarray:
    """The value of a recurrent layer: pending rows folded in, row by row, in numpy."""
    matrix = np.asarray(layer.recurrent_state[slot]).copy()
    keys, deltas, log_decays = (np.asarray(part[slot]) for part in layer.pending)
    group_size = matrix.shape[0] // keys.shape[1]
    for row in range(int(sequences.num_pending[slot])):
        key_of_head = np.repeat(keys[row], group_size, axis=0)
        decay = np.exp(log_decays[row])[:, None, None]
        matrix = decay * matrix + key_of_head[:, :, None] * deltas[row][:, None, :]
    return matrix


def poison(array: Array) -> Array:
    """The same shape, filled with what must never be seen."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.full_like(array, jnp.nan)
    if array.dtype == jnp.bool_:
        return jnp.ones_like(array)
    return jnp.full_like(array, 99)


def with_end_tokens(
    config: config_lib.ModelConfig, *tokens: int
) -> config_lib.ModelConfig:
    return dataclasses.replace(config, end_token_ids=tokens)

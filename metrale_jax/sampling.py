"""How a slot's tokens are picked: the per-slot options, and the one maker of them.

`logit_rules` and `picks` apply them, in the order of the fields below.
"""

import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from metrale_jax import config as config_lib
from metrale_jax.axes import Array

# Token ids that end a DRY match, per slot.
MAX_DRY_BREAKERS = 8
# Fills unused places of `dry_breakers`; it equals no token, and is never an index.
NO_TOKEN = -1

BITS_PER_WORD = 32

# Beyond it every distribution is uniform in float32.
_MAX_TEMPERATURE = 1e9
# Beyond it a logit leaves every other behind; infinity itself could make NaN.
_MAX_PENALTY = 1e9
_MAX_COUNT = 2**31 - 1

_RANGES: Mapping[str, tuple[float | int, float | int]] = {
    "temperature": (0.0, _MAX_TEMPERATURE),
    "top_k": (0, _MAX_COUNT),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, _MAX_PENALTY),
    "presence_penalty": (-_MAX_PENALTY, _MAX_PENALTY),
    "frequency_penalty": (-_MAX_PENALTY, _MAX_PENALTY),
    "dry_multiplier": (0.0, _MAX_PENALTY),
    "dry_base": (1.0, _MAX_PENALTY),
    "dry_allowed_length": (1, _MAX_COUNT),
    "dry_range": (0, _MAX_COUNT),
    "min_new_tokens": (0, _MAX_COUNT),
    "seed": (0, 2**64 - 1),
}


@struct.dataclass
class Sampling:
    """Options of B slots; in a `SlotRequest`, of one slot, without the leading B.

    Attributes:
      repetition_penalty: f32[B]; divides positive and multiplies negative logits of
        every token that the prompt or the output holds; 1 is off.
      presence_penalty: f32[B], subtracted from every token that the output holds.
      frequency_penalty: f32[B], the same, times how often the output holds it.
      dry_multiplier: f32[B]; 0 switches the DRY penalty off.
      dry_base: f32[B]; each token of a match beyond the allowed length multiplies the
        penalty by it.
      dry_allowed_length: i32[B], shortest repeated run that costs anything.
      dry_range: i32[B], newest tokens that DRY looks at; 0 is all.
      dry_breakers: i32[B, 8], tokens that end a match and are not penalised by it;
        `NO_TOKEN` elsewhere.
      bias_ids: i32[B, N], tokens whose logit is moved.
      bias_values: f32[B, N], by how much; 0 in unused places, -inf bans.
      min_new_tokens: i32[B], output tokens before which no end token is picked.
      allowed_tokens: u32[B, ceil(V / 32)], a bit per token, lowest bit first.
      temperature: f32[B]; below `picks.GREEDY_TEMPERATURE` the slot is greedy.
      top_k: i32[B]; 0 is off.
      top_p: f32[B]; 1 is off.
      min_p: f32[B]; 0 is off.
      request_key: u32[B, 2], the 64-bit seed, high word first.
    """

    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array
    dry_multiplier: Array
    dry_base: Array
    dry_allowed_length: Array
    dry_range: Array
    dry_breakers: Array
    bias_ids: Array
    bias_values: Array
    min_new_tokens: Array
    allowed_tokens: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    request_key: Array


def describe_sampling(
    config: config_lib.ModelConfig, decode: config_lib.DecodeConfig
) -> Sampling:
    """Returns a Sampling of `jax.ShapeDtypeStruct` for the batch's slots."""

    def per_slot(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((decode.num_slots, *shape), dtype)

    counts = per_slot(jnp.int32)
    numbers = per_slot(jnp.float32)
    return Sampling(
        repetition_penalty=numbers,
        presence_penalty=numbers,
        frequency_penalty=numbers,
        dry_multiplier=numbers,
        dry_base=numbers,
        dry_allowed_length=counts,
        dry_range=counts,
        dry_breakers=per_slot(jnp.int32, MAX_DRY_BREAKERS),
        bias_ids=per_slot(jnp.int32, decode.max_logit_bias),
        bias_values=per_slot(jnp.float32, decode.max_logit_bias),
        min_new_tokens=counts,
        allowed_tokens=per_slot(jnp.uint32, num_mask_words(config.vocab_size)),
        temperature=numbers,
        top_k=counts,
        top_p=numbers,
        min_p=numbers,
        request_key=per_slot(jnp.uint32, 2),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How one sequence's tokens are picked; the defaults are greedy, change no logit.

    Attributes:
      temperature: 0 is greedy, 1 the model's own distribution.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the most likely tokens that together reach this probability.
      min_p: drop tokens less likely than this fraction of the most likely one.
      repetition_penalty: see `Sampling`, as the other penalties.
      presence_penalty: see `Sampling`.
      frequency_penalty: see `Sampling`.
      dry_multiplier: see `Sampling`.
      dry_base: see `Sampling`.
      dry_allowed_length: see `Sampling`.
      dry_range: see `Sampling`.
      dry_breakers: at most `MAX_DRY_BREAKERS` token ids.
      logit_bias: token id -> number added to its logit; -inf bans it.
      allowed_token_ids: the only tokens that may be picked; None allows all.
      banned_token_ids: tokens that are never picked.
      min_new_tokens: output tokens before which no end token is picked.
      seed: in 0..2**64-1; the same seed gives the same tokens in any batch.

    Raises:
      ValueError: an option is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    dry_breakers: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            is_integer = isinstance(value, numbers.Integral)
            if isinstance(low, int) and not is_integer:
                raise ValueError(f"`{name}` must be an integer, got {value!r}.")
            _check_range(name, value, low, high)
        if self.top_p == 0.0:
            raise ValueError("`top_p` must be above 0, got 0; 1 keeps every token.")
        for token, value in self.logit_bias.items():
            if not (value == -np.inf or abs(value) <= _MAX_PENALTY):
                raise ValueError(
                    f"`logit_bias` must be -inf or within {_MAX_PENALTY:g} of 0, got "
                    f"{value} for token {token}."
                )
        if len(self.dry_breakers) > MAX_DRY_BREAKERS:
            raise ValueError(
                f"`dry_breakers` must hold at most {MAX_DRY_BREAKERS} tokens, got "
                f"{len(self.dry_breakers)}."
            )


def make_sampling(
    config: config_lib.ModelConfig,
    decode: config_lib.DecodeConfig,
    options: SamplingOptions,
) -> Sampling:
    """Returns one slot's options as arrays.

    Args:
      config: the target, for its vocabulary.
      decode: the batch, for the room it has for biases.
      options: what the sequence asks for.

    Raises:
      ValueError: an option names a token outside of the vocabulary, leaves no token to
        pick, or needs more room than the batch has.
    """
    bias_ids, bias_values = _bias_arrays(config, decode, options.logit_bias)
    return Sampling(
        repetition_penalty=jnp.float32(options.repetition_penalty),
        presence_penalty=jnp.float32(options.presence_penalty),
        frequency_penalty=jnp.float32(options.frequency_penalty),
        dry_multiplier=jnp.float32(options.dry_multiplier),
        dry_base=jnp.float32(options.dry_base),
        dry_allowed_length=jnp.int32(options.dry_allowed_length),
        dry_range=jnp.int32(options.dry_range),
        dry_breakers=_breaker_array(config, options.dry_breakers),
        bias_ids=bias_ids,
        bias_values=bias_values,
        min_new_tokens=jnp.int32(options.min_new_tokens),
        allowed_tokens=jnp.asarray(
            _allowed_words(config, options.allowed_token_ids, options.banned_token_ids)
        ),
        temperature=jnp.float32(options.temperature),
        top_k=jnp.int32(options.top_k),
        top_p=jnp.float32(options.top_p),
        min_p=jnp.float32(options.min_p),
        request_key=request_key(options.seed),
    )


def request_key(seed: int) -> Array:
    """Returns u32[2], the key of a seed in 0..2**64-1; distinct seeds, distinct keys.

    Raises:
      ValueError: the seed is outside that range.
    """
    _check_range("seed", seed, *_RANGES["seed"])
    return jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)


def num_mask_words(vocab_size: int) -> int:
    """Words of a mask with a bit per token."""
    return -(-vocab_size // BITS_PER_WORD)


def pack_mask(allowed: np.ndarray) -> np.ndarray:
    """Packs bool[..., V] into u32[..., ceil(V / 32)]; token 32 w + i is bit i of w.

    Bits past V are set, so that a mask which allows every token is all ones.
    """
    missing = -allowed.shape[-1] % BITS_PER_WORD
    widths = [(0, 0)] * (allowed.ndim - 1) + [(0, missing)]
    packed = np.packbits(
        np.pad(allowed, widths, constant_values=True), axis=-1, bitorder="little"
    )
    return packed.view("<u4").astype(np.uint32)


def unpack_mask(words: Array, vocab_size: int) -> Array:
    """Returns bool[..., V] of u32[..., ceil(V / 32)]; the inverse of `pack_mask`."""
    bit = jnp.arange(BITS_PER_WORD, dtype=jnp.uint32)
    bits = (words[..., None] >> bit.reshape((1,) * words.ndim + (-1,))) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab_size] != 0


def _check_range(
    name: str, value: float | int, low: float | int, high: float | int
) -> None:
    # Written so that NaN fails.
    if not low <= value <= high:
        raise ValueError(f"`{name}` must be in {low:g}..{high:g}, got {value}.")


def _check_tokens(
    name: str, tokens: Iterable[int], config: config_lib.ModelConfig
) -> list[int]:
    checked = list(tokens)
    for token in checked:
        if (
            not isinstance(token, numbers.Integral)
            or not 0 <= token < config.vocab_size
        ):
            raise ValueError(
                f"`{name}` must name tokens 0..{config.vocab_size - 1} (the "
                f"vocabulary), got {token}."
            )
    return checked


def _bias_arrays(
    config: config_lib.ModelConfig,
    decode: config_lib.DecodeConfig,
    logit_bias: Mapping[int, float],
) -> tuple[Array, Array]:
    ids = _check_tokens("logit_bias", logit_bias, config)
    if len(ids) > decode.max_logit_bias:
        raise ValueError(
            f"`logit_bias` must hold at most {decode.max_logit_bias} tokens, got "
            f"{len(ids)}; make the batch with a larger `max_logit_bias`."
        )
    padding = decode.max_logit_bias - len(ids)
    values = [float(logit_bias[token]) for token in ids]
    return (
        jnp.array([*ids, *[0] * padding], jnp.int32),
        jnp.array([*values, *[0.0] * padding], jnp.float32),
    )


def _breaker_array(config: config_lib.ModelConfig, breakers: Iterable[int]) -> Array:
    ids = _check_tokens("dry_breakers", breakers, config)
    padding = MAX_DRY_BREAKERS - len(ids)
    return jnp.array([*ids, *[NO_TOKEN] * padding], jnp.int32)


def _allowed_words(
    config: config_lib.ModelConfig,
    allowed_token_ids: Iterable[int] | None,
    banned_token_ids: Iterable[int],
) -> np.ndarray:
    is_allowed = np.full(config.vocab_size, allowed_token_ids is None)
    if allowed_token_ids is not None:
        is_allowed[_check_tokens("allowed_token_ids", allowed_token_ids, config)] = True
    is_allowed[_check_tokens("banned_token_ids", banned_token_ids, config)] = False
    if not is_allowed.any():
        raise ValueError(
            "`allowed_token_ids` and `banned_token_ids` leave no token to pick."
        )
    return pack_mask(is_allowed)


# Down here because making it runs the checks above.
GREEDY = SamplingOptions()

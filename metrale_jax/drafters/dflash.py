"""DFlash: a small network that drafts a whole block of tokens in one forward.

https://arxiv.org/abs/2602.06036. Of each committed token the drafter keeps, per layer,
a key and a value made from the target's residual streams. Its block, the last token
followed by mask tokens, attends to these and to itself; each row predicts the token at
its own position. Keys and values of the block are never stored.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from metrale_jax import config as config_lib
from metrale_jax import fold, indices
from metrale_jax import proposal as proposal_lib
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax.axes import Array, Float, Float32, Int32
from metrale_jax.drafters import choice, dflash_config, dflash_params, protocol
from metrale_jax.model import linear as linear_lib
from metrale_jax.model import mlp as mlp_lib
from metrale_jax.model import norm, rope
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch, verify_attention


@struct.dataclass
class DFlashDrafter(choice.ChoosesFromLogits):
    """A DFlash drafter; a pytree whose leaves are its parameters.

    Attributes:
      params: of the drafter.
      config: of the drafter.
      num_drafts: drafts per round, at most 15 and `config.block_size` - 1; a block
        shorter than the trained one is cheaper and drafts its first rows as well.
      draft_sampling: how drafts are chosen.
      num_candidates: likeliest tokens per draft to report; 0 for none.

    Raises:
      ValueError: an option is out of its range.
    """

    params: dflash_params.DFlashParams
    config: dflash_config.DFlashConfig = struct.field(pytree_node=False)
    num_drafts: int = struct.field(pytree_node=False)
    draft_sampling: choice.DraftSampling = struct.field(
        pytree_node=False, default="greedy"
    )
    num_candidates: int = struct.field(pytree_node=False, default=0)

    def __post_init__(self) -> None:
        protocol.check_num_drafts(self.num_drafts)
        most = self.config.block_size - 1
        if self.num_drafts > most:
            raise ValueError(
                f"`num_drafts` must be in 1..{most} (`block_size` - 1: the drafter "
                f"knows no longer block), got {self.num_drafts}."
            )
        choice.check_options(
            self.draft_sampling, self.num_candidates, self.config.head_size
        )

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def describe_state(
        self,
        config: config_lib.ModelConfig,
        decode: config_lib.DecodeConfig,
        *,
        dtype: DTypeLike,
    ) -> tuple[state_lib.KVCache, ...]:
        """Returns a KVCache of `jax.ShapeDtypeStruct` per layer of the drafter.

        Raises:
          ValueError: the drafter was made for another target.
        """
        dflash_config.check_target(self.config, config)
        shape = (
            decode.num_pages,
            decode.page_size,
            self.config.num_kv_heads,
            self.config.head_dim,
        )
        pages: Any = jax.ShapeDtypeStruct(shape, dtype)
        return (state_lib.KVCache(keys=pages, values=pages),) * self.config.num_layers

    def prefill(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        chunk: protocol.CommittedChunk,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> tuple[state_lib.KVCache, ...]:
        """Appends the chunk's keys and values; see `protocol.Drafter`."""
        del params, config, implementation
        return self._append(state, chunk.taps, chunk.start, chunk.num_tokens)

    def commit(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        rows: protocol.CommittedRows,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> tuple[state_lib.KVCache, ...]:
        """Appends the committed rows' keys and values; see `protocol.Drafter`."""
        del params, config, implementation
        return self._append(state, rows.taps, rows.start, rows.count)

    def propose(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> proposal_lib.Proposal:
        """Drafts one block per slot; see `protocol.Drafter`.

        A slot whose block would pass the drafter's `max_position` gets no drafts.
        `log_probs` are the drafter's own, before temperature and the like. The drafts
        are ids of the target, below its vocabulary.

        Raises:
          ValueError: the drafter was made for another target.
        """
        dflash_config.check_target(self.config, config)
        hidden = self._run_block(params, state, config, implementation)
        logits = self._project_logits(params, hidden, config.vocab_size)
        chosen = choice.choose_drafts(
            logits, state, self.draft_sampling, self.num_candidates
        )
        fits = state.length + self.num_drafts + 1 <= self.config.max_position
        num_drafts = jnp.where(fits, jnp.int32(self.num_drafts), 0)
        return choice.as_proposal(chosen, num_drafts)

    def _append(
        self,
        state: state_lib.SequenceState,
        taps: tuple[Array, ...],
        start: Int32[Array, " B"],
        num_rows: Int32[Array, " B"],
    ) -> tuple[state_lib.KVCache, ...]:
        """Writes keys and values of the first `num_rows` of the tapped rows.

        One vector per token, the same for all layers, passes each layer's projections
        and not its input norm.
        """
        with jax.named_scope("dflash_context"):
            streams = jnp.concatenate(taps, axis=-1).astype(self.params.fc.dtype)
            features = norm.plain_rms_norm(
                linear_lib.linear(streams, self.params.fc),
                self.params.hidden_norm,
                self.config.rms_norm_eps,
            )
            rotation = self._rotation(start, features.shape[1])
            return tuple(
                fold.write_kv_rows(
                    cache,
                    self._keys_and_values(layer, features, rotation, cache),
                    state.page_table,
                    start,
                    num_rows,
                )
                for layer, cache in zip(self.params.layers, state.drafter, strict=True)
            )

    def _run_block(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> Float[Array, "B J M"]:
        """Returns the final hidden of each row that stands for a draft."""
        x = self._embed_block(params, state.last_token)
        epsilon = self.config.rms_norm_eps
        rotation = self._rotation(state.length, x.shape[1])
        for index, (layer, cache) in enumerate(
            zip(self.params.layers, state.drafter, strict=True)
        ):
            with jax.named_scope(f"dflash_layer_{index}"):
                normed = norm.plain_rms_norm(x, layer.input_norm, epsilon)
                rows = self._keys_and_values(layer, normed, rotation, cache)
                outputs = verify_attention.verify_attention(
                    self._queries(layer, normed, rotation),
                    rows.keys,
                    rows.values,
                    cache.keys,
                    cache.values,
                    state.page_table,
                    state.length,
                    scale=self.config.head_dim**-0.5,
                    window=self.config.layer_window(index),
                    causal=self.config.layer_is_causal(index),
                    implementation=implementation,
                )
                flat = outputs.reshape(*outputs.shape[:2], -1)
                x = x + linear_lib.linear(flat, layer.o_proj)
                normed = norm.plain_rms_norm(x, layer.post_norm, epsilon)
                x = x + mlp_lib.mlp(
                    layer.mlp, normed, config=config, implementation=implementation
                )
        return norm.plain_rms_norm(x[:, 1:], self.params.final_norm, epsilon)

    def _embed_block(
        self, params: params_lib.ModelParams, last_token: Int32[Array, " B"]
    ) -> Float[Array, "B K M"]:
        """The last token, then a mask for every draft."""
        table = params.embedding
        if self.params.embedding is not None:
            table = self.params.embedding
        mask = table[self.config.mask_token_id]
        if self.params.mask_embedding is not None:
            mask = self.params.mask_embedding
        num_slots, width = last_token.shape[0], table.shape[1]
        dtype = self.params.fc.dtype
        masks = jnp.broadcast_to(
            mask.astype(dtype)[None, None], (num_slots, self.num_drafts, width)
        )
        block = jnp.concatenate([table[last_token][:, None].astype(dtype), masks], 1)
        return block * jnp.asarray(self.config.input_embedding_scale, dtype)

    def _rotation(
        self, start: Int32[Array, " B"], num_rows: int
    ) -> tuple[Float32[Array, "B K half"], Float32[Array, "B K half"]]:
        steps = jnp.arange(num_rows, dtype=jnp.int32)
        positions = start[:, None] + steps[None, :]
        return rope.rotation(positions, self.config.head_dim, self.config.rope_theta)

    def _queries(
        self,
        layer: dflash_params.DFlashLayerParams,
        x: Float[Array, "B K M"],
        rotation: tuple[Float32[Array, "B K half"], Float32[Array, "B K half"]],
    ) -> Float[Array, "B K H D"]:
        heads = (*x.shape[:2], self.config.num_heads, self.config.head_dim)
        queries = linear_lib.linear(x, layer.q_proj).reshape(heads)
        epsilon = self.config.rms_norm_eps
        return rope.rotate(
            norm.plain_rms_norm(queries, layer.q_norm, epsilon), *rotation
        )

    def _keys_and_values(
        self,
        layer: dflash_params.DFlashLayerParams,
        x: Float[Array, "B K M"],
        rotation: tuple[Float32[Array, "B K half"], Float32[Array, "B K half"]],
        cache: state_lib.KVCache,
    ) -> verdict_lib.KVRows:
        """Keys and values of rows, in the dtype of the pages."""
        heads = (*x.shape[:2], self.config.num_kv_heads, self.config.head_dim)
        keys = linear_lib.linear(x, layer.k_proj).reshape(heads)
        values = linear_lib.linear(x, layer.v_proj).reshape(heads)
        keys = norm.plain_rms_norm(keys, layer.k_norm, self.config.rms_norm_eps)
        return verdict_lib.KVRows(
            keys=rope.rotate(keys, *rotation).astype(cache.keys.dtype),
            values=values.astype(cache.values.dtype),
        )

    def _project_logits(
        self,
        params: params_lib.ModelParams,
        hidden: Float[Array, "B J M"],
        vocab_size: int,
    ) -> Float32[Array, "B J V"]:
        """Logits over the target's ids; -inf for those that the head has not."""
        head = params.output_head
        if self.params.lm_head is not None:
            head = self.params.lm_head
        elif self.params.embedding is not None and self.config.tie_word_embeddings:
            head = self.params.embedding
        with jax.named_scope("dflash_head"):
            logits = linear_lib.linear(hidden.astype(head.dtype), head)
            logits = logits.astype(jnp.float32) * self.config.output_multiplier
            cap = self.config.final_logit_softcapping
            if cap is not None:
                logits = cap * jnp.tanh(logits / cap)
            return self._spread(logits, vocab_size)

    def _spread(
        self, logits: Float32[Array, "B J draft"], vocab_size: int
    ) -> Float32[Array, "B J V"]:
        """Puts each logit at its target id; ids beyond the vocabulary are dropped."""
        num_rows = logits.shape[-1]
        if self.params.d2t is None and num_rows == vocab_size:
            return logits
        tokens = jnp.arange(num_rows, dtype=jnp.int32)
        if self.params.d2t is not None:
            tokens = tokens + self.params.d2t
        by_token = jnp.full((vocab_size, *logits.shape[:-1]), -jnp.inf, jnp.float32)
        by_token = indices.write_rows(by_token, (tokens,), jnp.moveaxis(logits, -1, 0))
        return jnp.moveaxis(by_token, 0, -1)

"""The drafter that a checkpoint brings along: its multi-token-prediction head.

The head (https://arxiv.org/abs/2404.19737, sequential as in
https://arxiv.org/abs/2412.19437) is one decoder layer with a KV cache of its own, in
the pages of the target's. Row p of that cache is made of the target's final hidden at
position p (after the last norm) and the token at position p + 1; its output, after the
head's norm, gives the logits of position p + 2. A slot that decodes has exactly
`length` rows, the last of them made of `last_token`, so draft 1 needs no forward.

Later drafts run the head on its own output in the hidden's place. Their rows rest on a
guess: they live for the round, as operands of the attention, and are never written.
"""

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from metrale_jax import config as config_lib
from metrale_jax import fold
from metrale_jax import proposal as proposal_lib
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax.axes import Array, Float, Float32, Int32
from metrale_jax.drafters import choice, protocol
from metrale_jax.model import attention, norm, rope, transformer
from metrale_jax.model import linear as linear_lib
from metrale_jax.model import mlp as mlp_lib
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch, verify_attention


@struct.dataclass
class MtpState:
    """What the head knows of B sequences.

    Attributes:
      cache: rows of committed positions, in the pages that the target's caches use.
      hidden: [B, M], output of each slot's newest row, after the head's norm; of no
        meaning before the slot's prompt is complete.
    """

    cache: state_lib.KVCache
    hidden: Array


@struct.dataclass
class MtpDrafter(choice.ChoosesFromLogits):
    """Drafts with a target's multi-token-prediction head; see `mtp_drafter`.

    Attributes:
      params: the head; embedding and output head are those of the target.
      token_ids: i32[Vd] ascending, the only tokens it drafts, or None for all.
      output_head: [Vd, M], the target's output head at `token_ids`, or None.
      num_drafts: J, drafts per round.
      draft_sampling: how a draft is picked.
      num_candidates: N of `Proposal.candidates`; 0 for none.
    """

    params: params_lib.MtpParams
    token_ids: Array | None
    output_head: Array | None
    num_drafts: int = struct.field(pytree_node=False)
    draft_sampling: choice.DraftSampling = struct.field(pytree_node=False)
    num_candidates: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        protocol.check_num_drafts(self.num_drafts)

    def describe_state(
        self,
        config: config_lib.ModelConfig,
        decode: config_lib.DecodeConfig,
        *,
        dtype: DTypeLike,
    ) -> MtpState:
        heads = (config.attention.num_kv_heads, config.attention.head_dim)
        pages: Any = jax.ShapeDtypeStruct(
            (decode.num_pages, decode.page_size, *heads), dtype
        )
        hidden: Any = jax.ShapeDtypeStruct(
            (decode.num_slots, config.hidden_size), dtype
        )
        return MtpState(
            cache=state_lib.KVCache(keys=pages, values=pages), hidden=hidden
        )

    def prefill(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        chunk: protocol.CommittedChunk,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> MtpState:
        """Adds the rows whose token the chunk brought.

        Rows lag a token behind: the row of a chunk's last token waits for the next
        chunk, which knows the token after it, or for the first token.
        """
        # Column i: the hidden of position start - 1 + i, and the token after it.
        hidden = jnp.concatenate(
            [chunk.previous_hidden[:, None], chunk.hidden],
            axis=1,
        )
        column = jnp.arange(hidden.shape[1], dtype=jnp.int32)[None, :]
        tokens = jnp.where(
            column == chunk.num_tokens[:, None],
            chunk.first_token[:, None],
            jnp.pad(chunk.tokens, ((0, 0), (0, 1))),
        )
        # Nothing comes before position 0.
        num_missing = (chunk.start == 0).astype(jnp.int32)
        source = jnp.minimum(column + num_missing[:, None], hidden.shape[1] - 1)
        count = chunk.num_tokens + chunk.is_last.astype(jnp.int32) - num_missing
        return self._extend(
            params,
            state,
            start=jnp.maximum(chunk.start - 1, 0),
            count=jnp.where(chunk.num_tokens > 0, count, 0),
            tokens=jnp.take_along_axis(tokens, source, axis=1),
            hidden=jnp.take_along_axis(hidden, source[:, :, None], axis=1),
            config=config,
            implementation=implementation,
        )

    def commit(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        rows: protocol.CommittedRows,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> MtpState:
        """Adds the committed rows, made of the target's own hiddens."""
        return self._extend(
            params,
            state,
            start=rows.start,
            count=rows.count,
            tokens=rows.next_tokens,
            hidden=rows.hidden,
            config=config,
            implementation=implementation,
        )

    def propose(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> proposal_lib.Proposal:
        """Drafts the first token from the newest row, each later one from its own."""
        first = self._pick(params, state, state.drafter.hidden, jnp.int32(0))
        chosen = first
        num_later = self.num_drafts - 1
        if num_later:

            def add_draft(chain: _Chain, index: Array) -> tuple[_Chain, choice.Choice]:
                chain = self._advance(
                    params,
                    state,
                    chain,
                    index,
                    config=config,
                    implementation=implementation,
                )
                draft = self._pick(params, state, chain.hidden, index + 1)
                return chain._replace(token=draft.drafts[:, 0]), draft

            chain = _start_chain(state, first.drafts[:, 0], num_later)
            _, later = jax.lax.scan(
                add_draft, chain, jnp.arange(num_later, dtype=jnp.int32)
            )
            chosen = jax.tree.map(
                lambda head, tail: jnp.concatenate(
                    [head, jnp.moveaxis(tail[:, :, 0], 0, 1)], axis=1
                ),
                first,
                later,
            )
        num_drafts = jnp.full_like(state.length, self.num_drafts)
        return choice.as_proposal(chosen, num_drafts)

    def _extend(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        *,
        start: Int32[Array, " B"],
        count: Int32[Array, " B"],
        tokens: Int32[Array, "B K"],
        hidden: Float[Array, "B K M"],
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> MtpState:
        """Writes the first `count` rows from position `start` on, and runs the last.

        With a single layer, keys and values depend on no other row: only the newest
        row, the one that drafts come from, passes attention and feed-forward.
        """
        kept: MtpState = state.drafter
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        is_row = column < count[:, None]
        x = self._fuse(
            params,
            jnp.where(is_row, tokens, 0),
            jnp.where(is_row[:, :, None], hidden, jnp.zeros((), hidden.dtype)),
            config,
        )
        rows = self._keys_and_values(x, start[:, None] + column, config)
        cache = fold.write_kv_rows(kept.cache, rows, state.page_table, start, count)
        last = jnp.maximum(count - 1, 0)
        output = self._run_row(
            jnp.take_along_axis(x, last[:, None, None], axis=1),
            jax.tree.map(
                lambda row: jnp.take_along_axis(row, last[:, None, None, None], axis=1),
                rows,
            ),
            jnp.int32(0),
            cache,
            state.page_table,
            start + last,
            config=config,
            implementation=implementation,
        )
        return MtpState(
            cache=cache, hidden=jnp.where(count[:, None] > 0, output, kept.hidden)
        )

    def _advance(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        chain: "_Chain",
        index: Int32[Array, ""],
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> "_Chain":
        """Runs the head on its newest draft and its own output; `token` stays."""
        x = self._fuse(params, chain.token[:, None], chain.hidden[:, None], config)
        row = self._keys_and_values(x, (state.length + index)[:, None], config)
        column = jnp.arange(chain.rows.keys.shape[1], dtype=jnp.int32)
        is_own = (column == index)[None, :, None, None]
        rows = jax.tree.map(
            lambda new, old: jnp.where(is_own, new, old), row, chain.rows
        )
        hidden = self._run_row(
            x,
            rows,
            index,
            state.drafter.cache,
            state.page_table,
            state.length,
            config=config,
            implementation=implementation,
        )
        return chain._replace(hidden=hidden, rows=rows)

    def _fuse(
        self,
        params: params_lib.ModelParams,
        tokens: Int32[Array, "B K"],
        hidden: Float[Array, "B K M"],
        config: config_lib.ModelConfig,
    ) -> Float[Array, "B K M"]:
        """The layer's input: each token with the hidden of the position before it."""
        head, epsilon = self.params, config.rms_norm_eps
        embedded = norm.zero_centred_rms_norm(
            params.embedding[tokens], head.embedding_norm, epsilon
        )
        hidden = norm.zero_centred_rms_norm(hidden, head.hidden_norm, epsilon)
        return linear_lib.linear(jnp.concatenate([embedded, hidden], axis=-1), head.fc)

    def _keys_and_values(
        self,
        x: Float[Array, "B K M"],
        positions: Int32[Array, "B K"],
        config: config_lib.ModelConfig,
    ) -> verdict_lib.KVRows:
        layer, mixer = _layer_of(self.params)
        normed = norm.zero_centred_rms_norm(x, layer.input_norm, config.rms_norm_eps)
        return attention.keys_and_values(
            mixer, normed, _rotation(positions, config), config=config
        )

    def _run_row(
        self,
        x: Float[Array, "B 1 M"],
        rows: verdict_lib.KVRows,
        index: Int32[Array, ""],
        cache: state_lib.KVCache,
        page_table: Int32[Array, "B pages"],
        length: Int32[Array, " B"],
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> Float[Array, "B M"]:
        """Runs the row at position `length + index`, after the head's norm.

        It attends to the pages below `length` and to `rows` 0..index, of which the last
        is its own.
        """
        layer, mixer = _layer_of(self.params)
        epsilon = config.rms_norm_eps
        with jax.named_scope("mtp_attention"):
            queries, gates = attention.queries_and_gates(
                mixer,
                norm.zero_centred_rms_norm(x, layer.input_norm, epsilon),
                _rotation((length + index)[:, None], config),
                config=config,
            )
            # One query at each row's place, of which the one in its own counts: the
            # pages are read once, whatever the number of queries.
            num_rows = rows.keys.shape[1]
            outputs = verify_attention.verify_attention(
                jnp.repeat(queries, num_rows, axis=1),
                rows.keys,
                rows.values,
                cache.keys,
                cache.values,
                page_table,
                length,
                scale=config.attention.head_dim**-0.5,
                implementation=implementation,
            )
            outputs = jnp.take(outputs, index[None], axis=1, mode="clip")
            x = x + attention.project_outputs(mixer, outputs, gates)
        with jax.named_scope("mtp_mlp"):
            normed = norm.zero_centred_rms_norm(x, layer.post_norm, epsilon)
            x = x + mlp_lib.mlp(
                layer.mlp, normed, config=config, implementation=implementation
            )
        return norm.zero_centred_rms_norm(x, self.params.final_norm, epsilon)[:, 0]

    def _pick(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        hidden: Float[Array, "B M"],
        column: Int32[Array, ""],
    ) -> choice.Choice:
        """Picks the draft of one column from the head's output."""
        logits = self._logits(params, hidden)
        chosen = choice.choose_drafts(
            logits[:, None],
            state,
            self.draft_sampling,
            self.num_candidates,
            first_column=column,
        )
        probs = chosen.probs
        if probs is not None and self.token_ids is not None:
            wide = (*probs.shape[:2], params.embedding.shape[0])
            probs = jnp.zeros(wide, jnp.float32).at[..., self.token_ids].set(probs)
        return chosen._replace(
            drafts=self._target_ids(chosen.drafts),
            probs=probs,
            candidates=None
            if chosen.candidates is None
            else self._target_ids(chosen.candidates),
        )

    def _logits(
        self, params: params_lib.ModelParams, hidden: Float[Array, "B M"]
    ) -> Float32[Array, "B Vd"]:
        if self.output_head is None:
            return transformer.project_logits(params, hidden)
        with jax.named_scope("output_head"):
            return linear_lib.linear(hidden, self.output_head).astype(jnp.float32)

    def _target_ids(self, choice: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """From rows of the head's logits to tokens of the target."""
        return choice if self.token_ids is None else self.token_ids[choice]


def mtp_drafter(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    *,
    num_drafts: int,
    draft_sampling: choice.DraftSampling = "greedy",
    token_ids: Iterable[int] | None = None,
    num_candidates: int = 0,
) -> MtpDrafter:
    """Returns a drafter that is the target's own multi-token-prediction head.

    Args:
      params: the target, with its head.
      config: of the target.
      num_drafts: drafts per round, 1..15. The head was trained for the first one; each
        further draft is right less often.
      draft_sampling: "sampled" is for the accept rules "rejection" and "block".
      token_ids: the only tokens to draft, in any order: projecting onto frequent tokens
        alone is cheaper (https://arxiv.org/abs/2502.14856), and can cost drafts but
        change no output. Their rows of the output head are copied.
      num_candidates: likeliest tokens to report per draft, for statistics.

    Raises:
      ValueError: the head is not loaded, or an argument is out of range.
      NotImplementedError: the head has more than one layer.
    """
    head = params.mtp
    if head is None:
        raise ValueError(
            "`params` has no multi-token-prediction head; load the checkpoint with "
            "`with_mtp=True`."
        )
    if len(head.layers) != 1:
        raise NotImplementedError(
            f"`params.mtp` must have 1 layer, got {len(head.layers)}."
        )
    ids = None if token_ids is None else _check_token_ids(token_ids, config.vocab_size)
    num_tokens = config.vocab_size if ids is None else len(ids)
    choice.check_options(draft_sampling, num_candidates, num_tokens)
    kept_ids = None if ids is None else jnp.array(ids, jnp.int32)
    return MtpDrafter(
        params=head,
        token_ids=kept_ids,
        output_head=None if kept_ids is None else params.output_head[kept_ids],
        num_drafts=num_drafts,
        draft_sampling=draft_sampling,
        num_candidates=num_candidates,
    )


class _Chain(NamedTuple):
    """Carry of the loop over drafts."""

    token: Array  # i32[B], the newest draft
    hidden: Array  # [B, M], the head's output that it was picked from
    rows: verdict_lib.KVRows  # of J - 1 drafts, 0 where none is yet


def _start_chain(
    state: state_lib.SequenceState, token: Int32[Array, " B"], num_rows: int
) -> _Chain:
    kept: MtpState = state.drafter

    def no_rows(pages: Array) -> Array:
        return jnp.zeros((state.num_slots, num_rows, *pages.shape[2:]), pages.dtype)

    return _Chain(
        token=token,
        hidden=kept.hidden,
        rows=verdict_lib.KVRows(
            keys=no_rows(kept.cache.keys), values=no_rows(kept.cache.values)
        ),
    )


def _layer_of(
    head: params_lib.MtpParams,
) -> tuple[params_lib.LayerParams, params_lib.AttentionParams]:
    (layer,) = head.layers
    if not isinstance(layer.mixer, params_lib.AttentionParams):
        raise TypeError(
            "`params.mtp` must be a layer of full attention, got "
            f"{type(layer.mixer).__name__}."
        )
    return layer, layer.mixer


def _rotation(
    positions: Int32[Array, "B K"], config: config_lib.ModelConfig
) -> tuple[Array, Array]:
    """The target's own rotation."""
    return rope.rotation(
        positions, config.attention.rotary_dim, config.attention.rope_theta
    )


def _check_token_ids(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Returns the ids in ascending order, so that ties go to the lower id."""
    ids = sorted(operator.index(token) for token in token_ids)
    if not ids:
        raise ValueError("`token_ids` must name at least one token, got none.")
    if ids[0] < 0 or ids[-1] >= vocab_size:
        outside = ids[0] if ids[0] < 0 else ids[-1]
        raise ValueError(
            f"`token_ids` must be in 0..{vocab_size - 1} (the vocabulary), got "
            f"{outside}."
        )
    for token, following in zip(ids[:-1], ids[1:], strict=True):
        if token == following:
            raise ValueError(f"`token_ids` must be distinct, got {token} twice.")
    return ids

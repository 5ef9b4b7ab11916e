"""A scripted target and drafter: the toy model of the engine whose rounds are replayed.

The target emits a script whatever it reads, unless a row's input departs from the
script: from there on its rows say 1. The drafter knows the script and errs at every
`wrong_every`-th token. Logits are made on the host; judging and applying them, and
limiting the drafts, is the library's own code.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import tiny_models as models
from metrale_jax import config as config_lib
from metrale_jax import drafting, fold, proposal, state, verdict, verify
from metrale_jax.drafters import confidence, protocol

VOCAB_SIZE = 64
END_TOKEN = 63
PAGE_SIZE = 16
MAX_LENGTH = 64
SCRIPTED_LOGIT = 30.0
OFF_SCRIPT_TOKEN = 1

CONFIG = config_lib.parse_model_config(
    models.RAW_DENSE | dict(vocab_size=VOCAB_SIZE, eos_token_id=END_TOKEN)
)

# Steps take a target's parameters; nothing here reads them.
PARAMS = models.make_params(CONFIG)


def run_of(num_tokens: int, base: int) -> list[int]:
    """`num_tokens` scripted tokens that count up from `base`, then the end token."""
    return [base + index % 20 for index in range(num_tokens)] + [END_TOKEN]


@dataclasses.dataclass(frozen=True)
class Script:
    """One request: a prompt, what the target says after it, where the drafter errs."""

    prompt: tuple[int, ...]
    script: tuple[int, ...]
    wrong_every: int = 0

    def token(self, index: int) -> int:
        """The index-th generated token; the script repeats its last token."""
        return self.script[min(index, len(self.script) - 1)]

    def rows(self, length: int, inputs: Sequence[int]) -> list[int]:
        """What the target says after each row of a verify at this length."""
        picks = []
        is_off = False
        for row, token in enumerate(inputs):
            index = length + row - len(self.prompt)
            is_off |= row > 0 and token != self.token(index)
            picks.append(OFF_SCRIPT_TOKEN if is_off else self.token(index + 1))
        return picks

    def drafts(self, length: int, num_drafts: int) -> list[int]:
        """What the drafter says after a `last_token` at this position."""
        first = length - len(self.prompt)
        drafts = []
        for index in range(first + 1, first + 1 + num_drafts):
            token = self.token(index)
            is_wrong = self.wrong_every and index % self.wrong_every == 0
            drafts.append((token + 1) % END_TOKEN if is_wrong else token)
        return drafts


def prompt_of(request: int, length: int) -> tuple[int, ...]:
    return (request, *(2 + index % 7 for index in range(length - 1)))


@struct.dataclass
class ToyDrafter(protocol.DrafterBase):
    """Proposes rows of a table that the host filled for this round."""

    table: jax.Array  # i32[B, J]
    num_drafts: int = struct.field(pytree_node=False)

    @property
    def max_drafts(self) -> int:
        return self.num_drafts

    def propose(self, params, state, *, config, implementation) -> proposal.Proposal:
        return proposal.Proposal(
            drafts=self.table,
            num_drafts=jnp.full(self.table.shape[0], self.num_drafts, jnp.int32),
            log_probs=jnp.zeros(self.table.shape, jnp.float32),
        )


@dataclasses.dataclass(frozen=True)
class Tick:
    """What one round did, per slot; a slot that was not served has no picks."""

    inputs: list[list[int]]
    picks: list[list[int]]
    num_accepted: list[int]
    emitted: list[list[int]]
    length: list[int]


class ToyBatch:
    """Sequences that decode together, round by round."""

    def __init__(self, sequences: Sequence[Script], num_drafts: int) -> None:
        self._sequences = sequences
        self._num_drafts = num_drafts
        decode = config_lib.for_slots(
            len(sequences), MAX_LENGTH, page_size=PAGE_SIZE, max_drafts=num_drafts
        )
        batch = state.init_state(CONFIG, decode, dtype=jnp.dtype(jnp.float32))
        tokens = np.zeros((len(sequences), MAX_LENGTH), np.int32)
        for slot, sequence in enumerate(sequences):
            request = state.make_request(CONFIG, decode, slot=slot)
            batch = state.insert(batch, jnp.int32(slot), request)
            tokens[slot, : len(sequence.prompt)] = sequence.prompt
            tokens[slot, len(sequence.prompt)] = sequence.token(0)
        lengths = [len(sequence.prompt) for sequence in sequences]
        # As after prefill: the prompt is inside, the first token is not.
        self.state = batch.replace(
            length=jnp.array(lengths, jnp.int32),
            prompt_length=jnp.array(lengths, jnp.int32),
            last_token=jnp.array([s.token(0) for s in sequences], jnp.int32),
            tokens=jnp.asarray(tokens),
            active=jnp.ones(len(sequences), bool),
            layers=(),
        )
        self._apply = jax.jit(fold.apply_verdict, static_argnames=("config",))
        self._judge = jax.jit(verify.judge, static_argnames=("config",))
        self._propose = jax.jit(drafting.propose, static_argnames=("config", "limits"))

    def propose(
        self,
        max_num_drafts: int | None = None,
        limits: confidence.DraftLimits = confidence.NO_LIMITS,
    ) -> list[list[int]]:
        """Proposes for every running slot; returns the drafts."""
        lengths = self.state.length.tolist()
        table = [
            sequence.drafts(length, self._num_drafts)
            for sequence, length in zip(self._sequences, lengths, strict=True)
        ]
        drafter = ToyDrafter(jnp.array(table, jnp.int32), self._num_drafts)
        most = self._num_drafts if max_num_drafts is None else max_num_drafts
        self.state = self._propose(
            PARAMS,
            self.state,
            drafter,
            jnp.full(len(table), most, jnp.int32),
            config=CONFIG,
            limits=limits,
        )
        return self._pending()

    def tick(self) -> Tick:
        """Verifies what is pending and applies the verdict."""
        active = self.state.active.tolist()
        lengths = self.state.length.tolist()
        pending = self._pending()
        inputs, picks = [], []
        logits = np.zeros((len(active), self._num_drafts + 1, VOCAB_SIZE), np.float32)
        last_tokens = self.state.last_token.tolist()
        for slot, sequence in enumerate(self._sequences):
            inputs.append([last_tokens[slot], *pending[slot]] if active[slot] else [])
            picks.append(sequence.rows(lengths[slot], inputs[slot]))
            for row, token in enumerate(picks[slot]):
                logits[slot, row, token] = SCRIPTED_LOGIT
        judgement = self._judge(
            self.state,
            jnp.asarray(logits),
            self.state.proposal.drafts,
            self.state.proposal.num_drafts,
            config=CONFIG,
        )
        rows = (len(active), self._num_drafts + 1, self.state.hidden.shape[1])
        result = verdict.Verdict(
            judgement=judgement,
            hidden=jnp.zeros(rows, jnp.float32),
            taps=(),
            layers=(),
        )
        self.state, emission = self._apply(self.state, result, config=CONFIG)
        return Tick(
            inputs=inputs,
            picks=picks,
            num_accepted=judgement.num_accepted.tolist(),
            emitted=[
                emission.tokens[slot, : int(emission.count[slot])].tolist()
                for slot in range(len(active))
            ],
            length=self.state.length.tolist(),
        )

    def output(self, slot: int) -> list[int]:
        """Every token that the slot has emitted."""
        first = len(self._sequences[slot].prompt)
        end = int(self.state.length[slot]) + 1
        return self.state.tokens[slot, first:end].tolist()

    def _pending(self) -> list[list[int]]:
        waiting = self.state.proposal
        return [
            waiting.drafts[slot, : int(waiting.num_drafts[slot])].tolist()
            for slot in range(len(self._sequences))
        ]

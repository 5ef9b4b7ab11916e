"""Flags that name a drafter, and the drafter they name: shared by the launchers."""

import jax
from absl import flags

from metrale_jax import checkpoint as checkpoint_lib
from metrale_jax import config as config_lib
from metrale_jax import drafters
from metrale_jax.drafters import confidence, protocol
from metrale_jax.model import params as params_lib

KINDS = ("none", "mtp", "dflash", "ngram", "prompt_lookup", "self")

_DRAFTER = flags.DEFINE_enum(
    "drafter", "none", KINDS, "Where drafts come from; none decodes plainly."
)
_DRAFTER_CHECKPOINT = flags.DEFINE_string(
    "drafter_checkpoint",
    None,
    "Folder or hub id: of the drafter for dflash; for mtp, of a checkpoint whose head "
    "is taken instead of the target's own.",
)
_NUM_DRAFTS = flags.DEFINE_integer(
    "num_drafts",
    None,
    "Drafts per round, 1 to 15; by default 3 for mtp, ngram and self, 7 for "
    "prompt_lookup, and a whole block for dflash.",
    lower_bound=1,
    upper_bound=protocol.MAX_NUM_DRAFTS,
)
_DRAFT_SAMPLING = flags.DEFINE_enum(
    "draft_sampling",
    "greedy",
    ["greedy", "sampled"],
    "Whether mtp, dflash and self take their likeliest token or draw it; drawn drafts "
    "want --accept_rule=rejection or block.",
)
_SELF_LAYERS = flags.DEFINE_list(
    "self_layers",
    None,
    "Layers that stay with --drafter=self; by default the attention layers.",
)
_CONFIDENCE_STOP = flags.DEFINE_float(
    "confidence_stop",
    None,
    "Offer no draft after one that its drafter (mtp, dflash, self) gives less than "
    "this probability.",
)
_PRUNE_RATIO = flags.DEFINE_float(
    "prune_ratio",
    None,
    "Of the drafts beyond each sequence's first, keep this share over the batch: the "
    "likeliest chains.",
)

_DEFAULT_NUM_DRAFTS = {"mtp": 3, "ngram": 3, "self": 3, "prompt_lookup": 7}


def drafter_kind() -> str:
    return _DRAFTER.value


def num_drafts() -> int | None:
    """What --num_drafts says; None if it is not given."""
    return _NUM_DRAFTS.value


def is_mtp() -> bool:
    """Whether the target must be loaded with its multi-token-prediction head."""
    return _DRAFTER.value == "mtp" and _DRAFTER_CHECKPOINT.value is None


def draft_limits() -> confidence.DraftLimits:
    """Raises ValueError for a value out of range."""
    return confidence.DraftLimits(
        confidence_stop=_CONFIDENCE_STOP.value, prune_ratio=_PRUNE_RATIO.value
    )


def check_flags() -> None:
    """Raises ValueError for flags that contradict each other, before any loading."""
    kind = _DRAFTER.value
    if kind == "dflash" and _DRAFTER_CHECKPOINT.value is None:
        raise ValueError(
            "--drafter=dflash needs --drafter_checkpoint=FOLDER_OR_HUB_ID."
        )
    if _DRAFTER_CHECKPOINT.value is not None and kind not in ("dflash", "mtp"):
        raise ValueError(
            f"--drafter_checkpoint is for dflash and mtp, got --drafter={kind}."
        )
    if _SELF_LAYERS.value is not None and kind != "self":
        raise ValueError(f"--self_layers is for self, got --drafter={kind}.")
    if _DRAFT_SAMPLING.value == "sampled" and kind not in ("mtp", "dflash", "self"):
        raise ValueError(
            "--draft_sampling=sampled is for drafters that have a distribution (mtp, "
            f"dflash, self), got --drafter={kind}."
        )
    draft_limits()


def build_drafter(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    *,
    dtype: jax.typing.DTypeLike,
    num_drafts: int | None = None,
) -> protocol.Drafter | None:
    """Returns the drafter that the flags name; None for none.

    Args:
      params: of the target.
      config: of the target.
      dtype: of a drafter's weights.
      num_drafts: drafts per round instead of --num_drafts.

    Raises:
      ValueError: the drafter doesn't fit the target, or its checkpoint is broken.
    """
    kind = _DRAFTER.value
    wanted = num_drafts or _NUM_DRAFTS.value
    if kind == "dflash":
        folder = checkpoint_lib.locate(_DRAFTER_CHECKPOINT.value)
        draft_config, draft_params = checkpoint_lib.load_dflash(
            folder, dtype=dtype, target_config=config
        )
        return drafters.DFlashDrafter(
            params=draft_params,
            config=draft_config,
            num_drafts=wanted or draft_config.block_size - 1,
            draft_sampling=_DRAFT_SAMPLING.value,
        )
    if kind == "none":
        return None
    wanted = wanted or _DEFAULT_NUM_DRAFTS[kind]
    match kind:
        case "mtp":
            return drafters.mtp_drafter(
                _with_head(params, config, dtype),
                config,
                num_drafts=wanted,
                draft_sampling=_DRAFT_SAMPLING.value,
            )
        case "ngram":
            return drafters.NGramDrafter(num_drafts=wanted)
        case "prompt_lookup":
            return drafters.PromptLookupDrafter(num_drafts=wanted)
        case "self":
            layers = drafters.attention_layers(config)
            if _SELF_LAYERS.value is not None:
                layers = _parse_layers(_SELF_LAYERS.value)
            return drafters.SelfSpeculationDrafter(
                layers=layers,
                num_drafts=wanted,
                draft_sampling=_DRAFT_SAMPLING.value,
            )
        case _:
            raise ValueError(f"--drafter must be one of {KINDS}, got {kind!r}.")


def _with_head(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    dtype: jax.typing.DTypeLike,
) -> params_lib.ModelParams:
    """The target's parameters with the head of --drafter_checkpoint, if it is given."""
    if _DRAFTER_CHECKPOINT.value is None:
        return params
    folder = checkpoint_lib.locate(_DRAFTER_CHECKPOINT.value)
    other_config, _ = checkpoint_lib.read_config(folder)
    if other_config.hidden_size != config.hidden_size:
        raise ValueError(
            f"--drafter_checkpoint has hidden size {other_config.hidden_size}, the "
            f"target {config.hidden_size}; a head serves the target it was trained on."
        )
    other = checkpoint_lib.load_params(folder, other_config, dtype=dtype, with_mtp=True)
    return params.replace(mtp=other.mtp)


def _parse_layers(values: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(value) for value in values)
    except ValueError:
        raise ValueError(
            f"--self_layers must be layer numbers, got {','.join(values)}."
        ) from None

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
    "Folder or hub id of the drafter, for --drafter=dflash.",
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
    return _DRAFTER.value == "mtp"


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
    if _DRAFTER_CHECKPOINT.value is not None and kind != "dflash":
        raise ValueError(f"--drafter_checkpoint is for dflash, got --drafter={kind}.")
    if _SELF_LAYERS.value is not None and kind != "self":
        raise ValueError(f"--self_layers is for self, got --drafter={kind}.")
    if _DRAFT_SAMPLING.value == "sampled" and kind not in ("mtp", "dflash", "self"):
        raise ValueError(
            "--draft_sampling=sampled is for drafters that have a distribution (mtp, "
            f"dflash, self), got --drafter={kind}."
        )
    if _CONFIDENCE_STOP.value is not None and kind in ("ngram", "prompt_lookup"):
        raise ValueError(
            "--confidence_stop is for drafters that have a confidence (mtp, dflash, "
            f"self), got --drafter={kind}."
        )
    if _PRUNE_RATIO.value is not None and _DRAFT_SAMPLING.value == "sampled":
        raise ValueError(
            "--prune_ratio would bias which drawn drafts are offered; give "
            "--draft_sampling=greedy, or --confidence_stop."
        )
    if kind == "none":
        for flag in (_NUM_DRAFTS, _CONFIDENCE_STOP, _PRUNE_RATIO):
            if flag.value is not None:
                raise ValueError(f"--{flag.name} needs --drafter.")
    draft_limits()


def load_drafter(
    config: config_lib.ModelConfig, *, dtype: jax.typing.DTypeLike
) -> protocol.Drafter | None:
    """Returns the drafter that the flags name; None for none, and for mtp.

    Args:
      config: of the target.
      dtype: of a drafter's weights.

    Raises:
      ValueError: the drafter doesn't fit the target, or its checkpoint is broken.
      NotImplementedError: a true but unsupported drafter.
    """
    kind = _DRAFTER.value
    num_drafts = _NUM_DRAFTS.value or _DEFAULT_NUM_DRAFTS.get(kind)
    match kind:
        case "none" | "mtp":
            return None
        case "dflash":
            folder = checkpoint_lib.locate(_DRAFTER_CHECKPOINT.value)
            draft_config, draft_params = checkpoint_lib.load_dflash(
                folder, dtype=dtype, target_config=config
            )
            whole_block = min(draft_config.block_size - 1, protocol.MAX_NUM_DRAFTS)
            return drafters.DFlashDrafter(
                params=draft_params,
                config=draft_config,
                num_drafts=num_drafts or whole_block,
                draft_sampling=_DRAFT_SAMPLING.value,
            )
        case "ngram":
            return drafters.NGramDrafter(num_drafts=num_drafts)
        case "prompt_lookup":
            return drafters.PromptLookupDrafter(num_drafts=num_drafts)
        case "self":
            layers = drafters.attention_layers(config)
            if _SELF_LAYERS.value is not None:
                layers = _parse_layers(_SELF_LAYERS.value)
            drafter = drafters.SelfSpeculationDrafter(
                layers=layers,
                num_drafts=num_drafts,
                draft_sampling=_DRAFT_SAMPLING.value,
            )
            drafter.check_layers(config)
            return drafter
        case _:
            raise ValueError(f"--drafter must be one of {KINDS}, got {kind!r}.")


def mtp_drafter(
    params: params_lib.ModelParams, config: config_lib.ModelConfig
) -> protocol.Drafter:
    """Returns the drafter that --drafter=mtp names: a part of the target's weights.

    Raises:
      ValueError: an option is out of range.
    """
    return drafters.mtp_drafter(
        params,
        config,
        num_drafts=_NUM_DRAFTS.value or _DEFAULT_NUM_DRAFTS["mtp"],
        draft_sampling=_DRAFT_SAMPLING.value,
    )


def _parse_layers(values: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(value) for value in values)
    except ValueError:
        raise ValueError(
            f"--self_layers must be layer numbers, got {','.join(values)}."
        ) from None

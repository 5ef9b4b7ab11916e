"""Flags that name a target, and how launchers load it with its drafter.

Whatever can be refused is refused before the weights are read, which may take minutes.
"""

import dataclasses
import pathlib

import drafter_flags
import jax
import jax.numpy as jnp
import launcher
from absl import flags

from metrale_jax import checkpoint as checkpoint_lib
from metrale_jax import config as config_lib
from metrale_jax import text as text_lib
from metrale_jax.drafters import protocol
from metrale_jax.model import params as params_lib

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Folder of a checkpoint, or its id on the Hugging Face hub."
)
_REVISION = flags.DEFINE_string(
    "revision",
    None,
    "Branch, tag or commit of a hub checkpoint, for every file of the target.",
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "auto",
    ["auto", "float32", "bfloat16"],
    "Of weights and caches; auto is float32 on a CPU, else bfloat16.",
)
_CHECK_FINITE = flags.DEFINE_bool(
    "check_finite", False, "Refuse weights that hold NaN or infinity."
)


@dataclasses.dataclass(frozen=True)
class OpenedTarget:
    """A checkpoint whose weights have not been read yet."""

    folder: pathlib.Path
    config: config_lib.ModelConfig
    tokenizer: text_lib.Tokenizer


def checkpoint() -> str:
    """What --checkpoint says.

    Raises:
      launcher.UsageError: it is not given.
    """
    if not _CHECKPOINT.value:
        raise launcher.UsageError(
            "--checkpoint is missing; give a folder or a Hugging Face id."
        )
    return _CHECKPOINT.value


def revision() -> str | None:
    """What --revision says; None if it is not given."""
    return _REVISION.value


def dtype() -> jnp.dtype:
    """Of weights and caches."""
    name = _DTYPE.value
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def open_target() -> OpenedTarget:
    """Finds the checkpoint, and reads its config and tokenizer.

    Raises:
      ValueError: see `checkpoint.locate` and `read_config`, or the tokenizer doesn't
        fit.
      OSError: a file can't be read.
    """
    folder = checkpoint_lib.locate(checkpoint(), revision=revision())
    config, _ = checkpoint_lib.read_config(folder)
    tokenizer = text_lib.Tokenizer.from_folder(folder)
    tokenizer.check_vocab_size(config.vocab_size)
    return OpenedTarget(pathlib.Path(folder), config, tokenizer)


def load(
    target: OpenedTarget,
) -> tuple[params_lib.ModelParams, protocol.Drafter | None]:
    """Loads the drafter that the flags name, then the target's weights.

    Raises:
      ValueError: the drafter doesn't fit the target, or a checkpoint is broken.
    """
    drafter = drafter_flags.load_drafter(target.config, dtype=dtype())
    with checkpoint_lib.progress_bar("loading weights") as progress:
        params = checkpoint_lib.load_params(
            target.folder,
            target.config,
            dtype=dtype(),
            with_mtp=drafter_flags.is_mtp(),
            check_finite=_CHECK_FINITE.value,
            progress=progress,
        )
    if drafter_flags.is_mtp():
        drafter = drafter_flags.mtp_drafter(params, target.config)
    return params, drafter

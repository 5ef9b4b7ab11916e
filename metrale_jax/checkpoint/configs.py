"""Reads config.json and generation_config.json of a checkpoint folder."""

import os
import pathlib
from typing import Any

from metrale_jax import config as config_lib
from metrale_jax.checkpoint import errors, strict_json

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"


def read_config(
    folder: str | os.PathLike[str],
) -> tuple[config_lib.ModelConfig, dict[str, Any]]:
    """Reads the target's configuration.

    Returns:
      The parsed config, which includes the end tokens of generation_config.json if
      there is one, and config.json as it is.

    Raises:
      CheckpointError: a file is missing, malformed, or holds values that make no
        target.
      NotImplementedError: a true but unsupported model; the message says what is.
    """
    raw = strict_json.read_object(pathlib.Path(folder) / CONFIG_NAME)
    generation = read_generation_config(folder)
    try:
        return config_lib.parse_model_config(raw, generation), raw
    except ValueError as error:
        raise errors.CheckpointError(
            errors.shown(error), file=pathlib.Path(folder) / CONFIG_NAME
        ) from error


def read_generation_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns generation_config.json as it is, empty when there is none.

    Raises:
      CheckpointError: the file is malformed.
    """
    path = pathlib.Path(folder) / GENERATION_NAME
    return strict_json.read_object(path) if os.path.lexists(path) else {}

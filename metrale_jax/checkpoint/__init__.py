"""Hugging Face checkpoints: find, read, check, load and save. safetensors only."""

from metrale_jax.checkpoint.configs import read_config, read_generation_config
from metrale_jax.checkpoint.dflash import load_dflash, save_dflash
from metrale_jax.checkpoint.errors import CheckpointError
from metrale_jax.checkpoint.load import load_params
from metrale_jax.checkpoint.progress import Progress, progress_bar
from metrale_jax.checkpoint.save import save_checkpoint
from metrale_jax.checkpoint.source import locate

__all__ = [
    "CheckpointError",
    "Progress",
    "load_dflash",
    "load_params",
    "locate",
    "progress_bar",
    "read_config",
    "read_generation_config",
    "save_checkpoint",
    "save_dflash",
]

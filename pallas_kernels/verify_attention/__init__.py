"""Attention of a few new rows over paged keys and values."""

from pallas_kernels.verify_attention.api import verify_attention

__all__ = ["verify_attention"]

"""Depthwise causal convolution with its window of past inputs."""

from pallas_kernels.causal_conv.api import causal_conv, shift_window

__all__ = ["causal_conv", "shift_window"]

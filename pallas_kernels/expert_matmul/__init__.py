"""Feed-forward experts of a mixture, applied to the rows routed to them."""

from pallas_kernels.expert_matmul.api import Implementation, expert_ffn

__all__ = ["Implementation", "expert_ffn"]

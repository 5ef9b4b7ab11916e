"""Gated delta rule: verify K rows, fold accepted rows, prefill."""

from pallas_kernels.gated_delta.api import fold, prefill, verify
from pallas_kernels.gated_delta.records import Records, VerifyOutput

__all__ = ["Records", "VerifyOutput", "fold", "prefill", "verify"]

"""Axis letters: every array in the package names its axes with these, everywhere.

| letter | axis                      | letter | axis                                |
| ------ | ------------------------- | ------ | ----------------------------------- |
| B      | sequences (slots)         | Hk, Hv | key / value heads of the delta rule |
| K      | verify rows               | Hkv    | key-value heads of full attention   |
| J      | drafts, K - 1             | Dk, Dv | key / value head dim, delta rule    |
| R      | slots of one prefill call | M      | model width                         |
| T      | time: tokens of a chunk   | F      | feed-forward width                  |
| S      | capacity along time       | E, A   | experts, active experts per token   |
| H, D   | query heads, head dim     | N      | flattened tokens, B*K or R*T        |
| V      | vocabulary                | W, C   | conv inputs kept, conv channels     |
| L, P   | layers, pages             |        |                                     |

Order: B, then K / T / S, then heads, then channels: `[B, K, H, D]`, `[B, Hv, Dk, Dv]`.
"""

from jax import Array
from jaxtyping import Bool, Float, Float32, Int32, UInt32

__all__ = ["Array", "Bool", "Float", "Float32", "Int32", "UInt32"]

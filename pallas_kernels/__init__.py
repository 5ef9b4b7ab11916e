"""Kernels for verifying draft tokens on hybrid models; imports jax and nothing else.

Each op has a folder: `api` (public functions), `reference` (the definition), `xla`
(fast, any backend) and `shapes` (real models' shapes for tests and benchmarks).
"""

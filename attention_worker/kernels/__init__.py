"""Kernels of the worker: sparse attention over the tokens that the indexer selected."""

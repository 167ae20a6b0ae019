"""Shapes of an indexer that the kernels are made for, and tested with."""

HEADS = (16, 32, 64, 128)
HEAD_DIM = 128
PAGE_SIZES = (32, 64, 128)
MAX_TOP_K = 4096

"""Kernels of the indexer, a pure library: tensors in, tensors out.

Each operation is a package: `__init__.py` is the public call (checks its arguments, picks an
implementation), `reference.py` says in plain torch what the call means and is the CPU engine.

    mqa_logits  scores of every cached key            k_cache  write and read the quantised keys
    topk        the k best of a row of scores          indexer  both in windows: what callers use
    step        one layer of one step of a batch       configuration  what selected bits depend on
    warm_up     every kernel made before it is needed  tuning  which blocks are the fastest here
"""

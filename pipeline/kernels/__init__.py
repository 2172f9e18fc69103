"""Triton kernels over the paged KV cache: write, decode, prefill.

Knows tensors alone: neither models nor sequences. Importing a module of this room imports triton; whoever
may run without it imports late.
"""

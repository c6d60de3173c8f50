"""Attention over a split sequence: plans, block kernels, and the node that joins the blocks."""

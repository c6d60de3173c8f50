"""The rival: the same networks parallelised by hand, as an expert would for these cases only.

Equal shards along dim 2, stencils no wider than a shard, one linear chain of ranks. It exists so
that the price of generality can be measured; nothing else uses it.
"""

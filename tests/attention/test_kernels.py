"""What is handed to torch's fused kernels."""

import torch

from shardfield.attention.kernels import _aligned


def test_an_aligned_bias_is_not_copied_for_every_sample_and_head():
    q, k = torch.zeros(5, 3, 4, 8), torch.zeros(5, 3, 7, 8)
    for shape in ((1, 1, 4, 7), (1, 3, 1, 7), (5, 1, 4, 1)):
        bias = torch.randn(shape)
        found = _aligned(bias, q, k)
        assert found is not None and found.equal(bias.expand(5, 3, 4, 7))
        assert found.stride(3) == 1 and all(stride % 8 == 0 for stride in found.stride()[:3])
        assert found.untyped_storage().nbytes() == bias.numel() // bias.shape[3] * 8 * 4

import pytest

from shardfield.demo.data import NETWORK_STRIDE, SHAPE, awkward_sizes, load_volume


def test_volume_is_the_padded_template_at_native_resolution():
    volume = load_volume()
    assert volume.image.shape == volume.target.shape == SHAPE
    assert volume.target.min() == 0
    assert volume.target.max() == 1
    head = volume.image[volume.image != 0]
    assert abs(head.mean().item()) < 1e-3
    assert abs(head.std().item() - 1) < 1e-3


def test_two_ranks_cut_in_the_middle_of_a_stride():
    assert awkward_sizes(208, 2) == [105, 103]


@pytest.mark.parametrize("ranks", range(1, 20))
@pytest.mark.parametrize("extent", [1, 7, 16, 208])
def test_sizes_add_up_and_avoid_the_stride(extent, ranks):
    sizes = awkward_sizes(extent, ranks)
    assert len(sizes) == ranks
    assert sum(sizes) == extent
    assert all(size >= 0 for size in sizes)
    aligned = [size for size in sizes if size and size % NETWORK_STRIDE == 0]
    assert len(aligned) <= 1

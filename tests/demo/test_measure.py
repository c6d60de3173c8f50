import torch

from shardfield.demo.measure import measure_step, storage_bytes


def test_kept_and_peak_of_a_step_whose_bytes_are_known():
    megabyte = 1 << 18  # float32 elements
    x = torch.ones(megabyte, requires_grad=True)

    def forward():
        return (x.exp() + 1).exp().sum()  # backward keeps both results of exp

    loss, cost = measure_step(forward, torch.Tensor.backward, [x])
    expected = 2 << 20
    assert loss.item() > 0
    assert expected <= cost.kept <= expected + 4096
    # Resident x, then beside the two kept results at least one gradient.
    assert cost.peak >= (4 << 20)
    assert cost.sent == cost.collectives == 0


def test_storage_is_charged_whole_and_once():
    whole = torch.zeros(1000)
    assert storage_bytes([whole[:10], whole[10:20]]) == 4000
    assert storage_bytes([whole[:10].clone()]) == 40

"""Tensors in mapped memory: apart from each other, aligned, zero, and alive as long as they are used."""

import gc

import torch

from pdserve.kernels.huge_pages import CHUNK_BYTES, HugePages


def test_tensors_are_apart_and_aligned():
    memory = HugePages()
    made = [memory.empty((3, length), torch.bfloat16) for length in (1, 33, 64)]
    for value, tensor in enumerate(made):
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(value + 1)
    assert [float(tensor.float().mean()) for tensor in made] == [1.0, 2.0, 3.0]


def test_what_does_not_fit_into_the_rest_begins_further_memory():
    memory = HugePages()
    first = memory.empty((CHUNK_BYTES - 64,), torch.uint8)
    second = memory.empty((65,), torch.uint8)
    first.fill_(1)
    assert not second.any()


def test_a_tensor_may_be_larger_than_what_is_mapped_at_once():
    large = HugePages().empty((CHUNK_BYTES + 1,), torch.uint8)
    large[-1] = 7
    assert int(large[-1]) == 7


def test_memory_lives_as_long_as_a_tensor_in_it():
    tensor = HugePages().empty((1000,), torch.float32).fill_(5.0)
    gc.collect()
    assert bool((tensor == 5.0).all())

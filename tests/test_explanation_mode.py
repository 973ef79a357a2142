import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchbcos as tb
from cases import conv, conv_cases, mode, random
from oracle import TOLERANCE, Layer, assert_agrees
from torchbcos import functional as BF


@settings(max_examples=40)
@given(conv_cases(), st.sampled_from(list(TOLERANCE)))
def test_values_are_the_same_to_the_bit_in_explanation_mode(case, dtype):
    x, weight, arguments = case
    x, weight = x.to(dtype), weight.to(dtype)
    outside = conv(x, weight, **arguments)
    with tb.explanation_mode():
        inside = conv(x, weight, **arguments)
    assert torch.equal(outside, inside)


@pytest.fixture
def probe():
    """A function that tells by its gradient which mode it ran in, and both right answers."""
    x, weight = random(0, 4, 6), random(1, 6, 6)

    def gradient():
        leaf = x.clone().requires_grad_()
        out = BF.bcos_linear(leaf, weight, max_out=2)
        return torch.autograd.grad(out.sum(), leaf)[0]

    layer = Layer(weight, max_out=2)
    right = {e: layer.gradients(x, np.ones((4, 3)), explain=e)[0] for e in (False, True)}
    assert np.abs(right[True] - right[False]).max() > 0.1
    return gradient, right


def test_the_mode_nests_and_ends(probe):
    gradient, right = probe
    with tb.explanation_mode():
        with tb.explanation_mode():
            assert_agrees(gradient(), right[True])
        assert BF.in_explanation_mode()
        assert_agrees(gradient(), right[True])
    assert not BF.in_explanation_mode()
    assert_agrees(gradient(), right[False])


@pytest.mark.parametrize("context", [tb.explanation_mode, BF.collect_offsets])
def test_the_mode_survives_exceptions(probe, context):
    gradient, right = probe
    with context():
        with pytest.raises(ValueError, match="on purpose"), context():
            raise ValueError("on purpose")
        assert_agrees(gradient(), right[True])
    with pytest.raises(ValueError, match="on purpose"), context():
        raise ValueError("on purpose")
    assert not BF.in_explanation_mode()
    assert_agrees(gradient(), right[False])


def test_the_mode_of_the_forward_pass_counts_not_that_of_the_backward(probe):
    _, right = probe
    x, weight = random(0, 4, 6).requires_grad_(), random(1, 6, 6)
    out = BF.bcos_linear(x, weight, max_out=2)
    with tb.explanation_mode():
        frozen_out = BF.bcos_linear(x, weight, max_out=2)
        assert_agrees(torch.autograd.grad(out.sum(), x)[0], right[False])
    assert_agrees(torch.autograd.grad(frozen_out.sum(), x)[0], right[True])


def test_each_thread_has_its_own_mode(probe):
    gradient, right = probe
    threads = 8
    together = threading.Barrier(threads, timeout=30)

    def work(number):
        seen = []
        for turn in range(6):
            explain = (number + turn) % 2 == 0
            together.wait()  # all enter, compute and leave at the same time
            with mode(explain):
                together.wait()
                seen.append((explain, gradient()))
                together.wait()
            assert not BF.in_explanation_mode()
        return seen

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, number) for number in range(threads)]
        results = [pair for future in futures for pair in future.result()]
    assert sum(explain for explain, _ in results) == len(results) / 2
    for explain, grad in results:
        assert_agrees(grad, right[explain])


def test_each_task_has_its_own_mode(probe):
    gradient, right = probe

    async def work(explain):
        await asyncio.sleep(0)
        if not explain:
            await asyncio.sleep(0)
            return gradient()
        with tb.explanation_mode():
            await asyncio.sleep(0)  # the other tasks run while this one is in the mode
            return gradient()

    async def all_at_once():
        return await asyncio.gather(*(work(n % 2 == 0) for n in range(8)))

    for n, grad in enumerate(asyncio.run(all_at_once())):
        assert_agrees(grad, right[n % 2 == 0])


def test_the_callers_tensors_are_left_alone():
    x = random(0, 2, 4, 5, 5).requires_grad_()
    weight = random(1, 6, 4, 3, 3).requires_grad_()
    before = x.detach().clone(), weight.detach().clone()
    with tb.explanation_mode():
        out = BF.bcos_conv2d(x, weight, padding=1, padding_mode="reflect", max_out=2)
        torch.autograd.grad(out.sum(), x)
    for tensor, copy in zip((x, weight), before, strict=True):
        assert torch.equal(tensor, copy)
        assert tensor._version == 0
        assert tensor.grad is None
        assert tensor.requires_grad
        assert tensor.is_leaf


def test_explanation_mode_needs_no_gradients():
    x, weight = random(0, 2, 5), random(1, 3, 5)
    with tb.explanation_mode(), torch.inference_mode():
        out = BF.bcos_linear(x, weight)
    assert not out.requires_grad
    assert_agrees(out, Layer(weight).forward(x))


def test_offsets_are_listed_only_while_collected():
    x = torch.ones(2, 3, requires_grad=True)
    bias = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with BF.collect_offsets() as offsets:
        assert BF.in_explanation_mode()
        inside = BF.add_offset(x, bias)
    outside = BF.add_offset(x, bias)
    assert torch.equal(inside, outside)
    assert len(offsets) == 1
    assert torch.equal(offsets[0], bias.expand(2, 3))
    weights = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    (by_offset,) = torch.autograd.grad((weights * inside).sum(), offsets[0])
    assert_agrees(by_offset, weights)
    assert bias.grad is None


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "value", [math.log(0.1 / 0.9), torch.tensor([0.1, 0.2, 0.3]), torch.tensor(0.1)], ids=repr
)
def test_adding_an_offset_is_the_same_to_the_bit_while_collected(dtype, value):
    x = random(0, 5, 3, dtype=dtype)
    outside = BF.add_offset(x, value)
    with BF.collect_offsets() as offsets:
        inside = BF.add_offset(x, value)
    assert len(offsets) == 1
    assert inside.dtype == outside.dtype
    assert torch.equal(inside, outside)


def test_inner_collections_of_offsets_do_not_reach_the_outer():
    with BF.collect_offsets() as outer:
        BF.add_offset(torch.zeros(1), torch.ones(1))
        with BF.collect_offsets() as inner:
            BF.add_offset(torch.zeros(1), torch.full((1,), 2.0))
        BF.add_offset(torch.zeros(1), torch.full((1,), 3.0))
    assert [o.item() for o in inner] == [2.0]
    assert [o.item() for o in outer] == [1.0, 3.0]


def test_hold_is_constant_only_in_explanation_mode():
    x = torch.tensor([2.0], requires_grad=True)
    (outside,) = torch.autograd.grad(x * BF.hold(x), x)
    with tb.explanation_mode():
        (inside,) = torch.autograd.grad(x * BF.hold(x), x)
    assert (outside.item(), inside.item()) == (4.0, 2.0)


def test_a_gate_is_constant_only_in_explanation_mode():
    x = random(0, 2, 3).requires_grad_()
    with tb.explanation_mode():
        inside = BF.gate(x, x.sigmoid())
    outside = BF.gate(x, x.sigmoid())
    assert torch.equal(inside, outside)
    assert_agrees(torch.autograd.grad(inside.sum(), x)[0], x.sigmoid())
    slope = x.sigmoid() + x * x.sigmoid() * (1 - x.sigmoid())
    assert_agrees(torch.autograd.grad(outside.sum(), x)[0], slope)


def test_generators_that_hold_the_mode_may_end_in_any_order(probe):
    gradient, right = probe

    def rows():
        with tb.explanation_mode():
            yield from range(2)

    for _ in zip(rows(), rows(), strict=False):
        pass
    first, second = rows(), rows()
    next(first), next(second)
    first.close()
    assert BF.in_explanation_mode()
    second.close()
    assert not BF.in_explanation_mode()
    assert_agrees(gradient(), right[False])


def test_an_abandoned_asynchronous_generator_ends_the_mode_without_a_complaint():
    async def rows():
        with BF.collect_offsets():
            yield 1
            yield 2

    async def one():
        async for _ in rows():
            break

    loop = asyncio.new_event_loop()
    complaints = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    loop.run_until_complete(one())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    assert not complaints
    assert not BF.in_explanation_mode()


def test_the_mode_decorates_functions_and_refuses_what_runs_later(probe):
    gradient, right = probe
    assert_agrees(tb.explanation_mode()(gradient)(), right[True])
    assert_agrees(gradient(), right[False])

    def later():
        yield 1

    async def coroutine():
        return 1

    for function in (later, coroutine):
        with pytest.raises(TypeError, match=f"{function.__name__}. must be an ordinary function"):
            tb.explanation_mode()(function)


def test_a_mode_within_a_recorded_pass_is_not_recorded(probe):
    gradient, right = probe
    with BF.record_factors() as tape:
        with tb.explanation_mode():
            assert_agrees(gradient(), right[True])
        assert tape.factors == []
        gradient()
        assert len(tape.factors) == 1

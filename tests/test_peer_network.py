"""A whole ResNet-34 with the peer's weights: the same logits, the same explanations.

In float64, so that what is left are the peer's epsilons; benchmarks/explain.py compares in float32.
"""

import pytest
import torch
from bcos.models.resnet import resnet34
from bcos.modules import norms as peer_norms
from torch import nn

import torchbcos as tb
from oracle import PEER_TOLERANCE, assert_agrees
from torchbcos.data import shapes
from torchbcos.encoding import encode


@pytest.fixture(scope="module")
def images():
    return shapes(2, size=64, seed=4).images.double()


@pytest.fixture(scope="module")
def networks(images):
    """(ours, the peer's), with the running statistics of `images`."""
    torch.manual_seed(0)
    norm_layer = peer_norms.NoBias(peer_norms.BatchNormUncentered2d)
    peer = resnet34(num_classes=10, norm_layer=norm_layer).double().train()
    for module in peer.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        peer(encode(images))
    ours = tb.create_model("resnet34", num_classes=10, max_out=1, norm="uncentred").double()
    state = {f"network.{k.replace('.linear.', '.')}": v for k, v in peer.state_dict().items()}
    ours.load_state_dict(state)
    ours.scaling = "custom"
    assert ours.logit_bias == pytest.approx(peer.logit_layer.logit_bias)
    return ours.eval(), peer.eval()


def test_logits_agree(networks, images):
    ours, peer = networks
    with torch.no_grad():
        right = peer(encode(images)) - peer.logit_layer.logit_bias
        assert right.abs().max() > 0.01
        assert_agrees(ours(images) - ours.logit_bias, right, tolerance=PEER_TOLERANCE)


def test_one_batched_explanation_is_all_of_the_peers_single_ones(networks, images):
    ours, peer = networks
    targets = torch.tensor([[3, 7, 0], [1, 9, 3]])
    e = tb.explain(ours, images, targets)
    for n, row in enumerate(targets.tolist()):
        for k, target in enumerate(row):
            found = peer.explain(encode(images[n : n + 1]).requires_grad_(), target)
            right = found["dynamic_linear_weights"][0]
            assert_agrees(e.weights[n, k], right, tolerance=PEER_TOLERANCE)
            right = found["contribution_map"][0].detach()
            assert_agrees(e.contributions[n, k], right, tolerance=PEER_TOLERANCE)


def test_the_default_is_the_peers_default(networks, images):
    ours, peer = networks
    e = tb.explain(ours, images)
    for n in range(2):
        found = peer.explain(encode(images[n : n + 1]).requires_grad_())
        assert e.targets[n].tolist() == [found["explained_class_idx"]]
        right = found["dynamic_linear_weights"][0]
        assert_agrees(e.weights[n, 0], right, tolerance=PEER_TOLERANCE)

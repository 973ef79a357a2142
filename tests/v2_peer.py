"""The networks of the authors' second program, `bcos` on PyPI."""

import math
import warnings

import torch


def made(name):
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        from bcos.models import pretrained

        return getattr(pretrained, name)(pretrained=False).eval()


@torch.no_grad()
def lively(network, size):
    """The network with scales and statistics that leave no part of it without effect.

    Its logits have no bias any more, beside which small ones could not be compared.
    """
    generator = torch.Generator().manual_seed(0)

    def around_one(shape):
        return torch.rand(shape, generator=generator) + 0.5

    def measure(norm, inputs):
        norm.running_var.copy_(inputs[0].var((0, 2, 3)) * around_one(norm.running_var.shape))

    for name, parameter in network.named_parameters():
        if parameter.dim() == 1 or name.endswith("layer_scale"):
            parameter.copy_(around_one(parameter.shape))
    norms = [m for m in network.modules() if hasattr(m, "running_var")]
    hooks = [norm.register_forward_pre_hook(measure) for norm in norms]
    image = torch.rand(1, 3, size, size, generator=generator)
    network(torch.cat([image, 1 - image], 1))
    for hook in hooks:
        hook.remove()
    (head,) = (m for m in network.modules() if hasattr(m, "logit_bias"))
    assert head.logit_bias == -math.log(999)
    head.logit_bias = None
    return network

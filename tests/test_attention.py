"""Attention of B-cos layers: with B = 1 it is torch's own with unit rows, and always linear."""

import math

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

import torchbcos as tb
from cases import random
from oracle import assert_agrees
from test_convert import SIZE, WIDTH, Net, Undecided, assert_complete, became, convert, images
from torchbcos import attention
from torchbcos.convert.twins import attention_twin
from torchbcos.norms import UncentredLayerNorm

DIM, HEADS, LENGTH = 8, 2, 5


def unit(weight):
    return weight / weight.flatten(1).norm(dim=1, keepdim=True)


@torch.no_grad()
def attended(options, seed=0):
    """torch's attention with rows of length 1 and no biases, and ours with the same rows, B = 1."""
    torch.manual_seed(seed)
    theirs = nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64, **options).train()
    ours = attention_twin(theirs, 1.0, 1, False)
    if theirs.in_proj_weight is not None:
        q, k, v = theirs.in_proj_weight.chunk(3)
    else:
        q, k, v = theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight
    for own, weight in zip(
        (ours.q_proj, ours.k_proj, ours.v_proj, ours.out_proj),
        (q, k, v, theirs.out_proj.weight),
        strict=True,
    ):
        weight.copy_(unit(weight))
        own.weight.copy_(weight)
    for bias in (theirs.in_proj_bias, theirs.out_proj.bias):
        if bias is not None:
            bias.zero_()
    return theirs, ours


FORBIDDEN = torch.ones(LENGTH, LENGTH).triu(1).bool()
MASKS = {
    "none": {},
    "boolean": {"attn_mask": FORBIDDEN},
    "causal": {"attn_mask": FORBIDDEN, "is_causal": True},
    "added": {"attn_mask": random(3, LENGTH, LENGTH)},
    "of each head": {"attn_mask": random(3, 3 * HEADS, LENGTH, LENGTH)},
    "of keys": {"key_padding_mask": torch.tensor([[False] * 3 + [True] * 2] * 3)},
    "both": {
        "attn_mask": random(3, LENGTH, LENGTH),
        "key_padding_mask": random(4, 3, LENGTH),
    },
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_with_b_1_it_is_torchs_own_attention(batch_first, need_weights, masks):
    theirs, ours = attended({"batch_first": batch_first, "bias": False})
    shape = (3, LENGTH, DIM) if batch_first else (LENGTH, 3, DIM)
    query, key, value = (random(seed, *shape) for seed in range(3))
    expected, their_weights = theirs(query, key, value, need_weights=need_weights, **masks)
    found, weights = ours(query, key, value, need_weights=need_weights, **masks)
    assert_agrees(found, expected)
    if need_weights:
        assert_agrees(weights, their_weights)
    else:
        assert weights is None


def test_keys_and_values_of_other_widths_biases_heads_and_single_images():
    theirs, ours = attended({"kdim": 6, "vdim": 7, "bias": True})
    query, key, value = (random(w, LENGTH, w) for w in (DIM, 6, 7))
    expected, their_weights = theirs(query, key, value, average_attn_weights=False)
    found, weights = ours(query, key, value, average_attn_weights=False)
    assert_agrees(found, expected)
    assert_agrees(weights, their_weights)
    with pytest.raises(ValueError, match=r"`num_heads` \(=3\) must divide `embed_dim` \(=8\)"):
        attention.BcosMultiheadAttention(8, 3)


def identity(x):
    return x


@torch.no_grad()
def encoder_layer(norm_first):
    """torch's layer without its activation, of unit rows, with uncentred norms; and ours."""
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        DIM, HEADS, 12, 0.0, identity, norm_first=norm_first, batch_first=True, dtype=torch.float64
    ).train()
    ours = attention_twin(theirs, 1.0, 1, True)
    plain, own = attended({"batch_first": True})
    theirs.self_attn, ours.self_attn = plain, own
    for name in ("linear1", "linear2"):
        linear = getattr(theirs, name)
        linear.weight.copy_(unit(linear.weight))
        linear.bias.zero_()
        getattr(ours, name).weight.copy_(linear.weight)
    theirs.norm1, theirs.norm2 = ours.norm1.double(), ours.norm2.double()
    return theirs, ours


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_with_b_1_is_torchs_own(norm_first):
    theirs, ours = encoder_layer(norm_first)
    assert isinstance(ours.norm1, UncentredLayerNorm)
    x = random(5, 3, LENGTH, DIM)
    masks = (MASKS["added"]["attn_mask"], MASKS["both"]["key_padding_mask"])
    assert_agrees(ours(x), theirs(x))
    assert_agrees(ours(x, *masks), theirs(x, *masks))


def test_an_encoder_passes_its_masks_to_all_layers_and_norms_last():
    layers = [encoder_layer(first)[1] for first in (False, True)]
    last = UncentredLayerNorm(DIM, dtype=torch.float64)
    x = random(5, 3, LENGTH, DIM)
    masks = (MASKS["added"]["attn_mask"], MASKS["both"]["key_padding_mask"])
    whole = attention.BcosTransformerEncoder(layers, last)
    assert torch.equal(whole(x, *masks), last(layers[1](layers[0](x, *masks), *masks)))


@pytest.mark.parametrize("kind", [ShiftedWindowAttention, ShiftedWindowAttentionV2])
@pytest.mark.parametrize("shift", [(0, 0), (1, 2), (0, 2)])
@pytest.mark.parametrize("size", [(8, 12), (7, 9), (3, 9), (2, 3)])
def test_shifted_windows_with_b_1_are_torchvisions_own(kind, shift, size):
    torch.manual_seed(0)
    with torch.no_grad():
        theirs = kind(DIM, [4, 4], list(shift), HEADS).double().eval()
        for name, parameter in theirs.named_parameters():
            if name in ("qkv.weight", "proj.weight"):
                parameter.copy_(unit(parameter))
            elif name in ("qkv.bias", "proj.bias"):
                parameter.zero_()
            else:
                parameter.normal_()
        ours = attention_twin(theirs, 1.0, 1, False)
        ours.qkv.weight.copy_(theirs.qkv.weight)
        ours.proj.weight.copy_(theirs.proj.weight)
        x = random(5, 2, *size, DIM)
        assert_agrees(ours(x), theirs(x))


# Conversion.


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def to_map(t):
    return t.transpose(1, 2).unflatten(2, (SIZE, SIZE))


def by_module(net, x):
    return to_map(net.part(tokens(x), tokens(x), value=tokens(x))[0])


def by_module_and_unpacked(net, x):
    x = tokens(x)
    out, _ = net.part(x, x, x, None, True)
    return to_map(x + out)


def seen_from(net, x):
    x = tokens(x)
    return to_map(net.part(net.query.expand(x.shape[0], -1, -1), x, x)[0])


def encoded(net, x):
    return to_map(net.part(tokens(x)))


def encoded_with_a_mask(net, x):
    x = tokens(x)
    return to_map(net.part(src_mask=net.mask, src=x))


def plain(**options):
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)


def used_twice(net, x):
    x = tokens(x)
    x = x + net.part(x, x, x)[0]
    return to_map(x + net.part(x, x, x)[0])


NETWORKS = {
    "used twice": (used_twice, lambda: {"part": plain()}),
    "by keyword": (by_module, lambda: {"part": plain()}),
    "unpacked": (by_module_and_unpacked, lambda: {"part": plain()}),
    "learned queries": (
        seen_from,
        lambda: {"part": plain(), "query": nn.Parameter(torch.randn(1, SIZE * SIZE, WIDTH))},
    ),
    "encoder layer": (
        encoded,
        lambda: {"part": nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True)},
    ),
    "encoder layer with a mask": (
        encoded_with_a_mask,
        lambda: {
            "part": nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True),
            "mask": torch.rand(SIZE * SIZE, SIZE * SIZE),
        },
    ),
    "encoder": (
        encoded,
        lambda: {
            "part": nn.TransformerEncoder(
                nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True, norm_first=True),
                2,
                nn.LayerNorm(WIDTH),
                enable_nested_tensor=False,
            )
        },
    ),
}


@pytest.mark.parametrize("norm", [None, "uncentred"])
@pytest.mark.parametrize(("body", "parts"), NETWORKS.values(), ids=NETWORKS)
def test_attention_of_torchs_modules_becomes_linear(body, parts, norm):
    model = convert(Net(body, **parts()), norm=norm, max_out=2)
    assert model.report.dynamic_linear
    (what,) = became(model, "part")
    assert what.startswith("Bcos")
    assert_complete(model)
    for _, layer in model.bcos_layers():
        assert layer.max_out == 2


def weights_as_signal(net, x):
    x = tokens(x)
    out, weights = net.part(x, x, x)
    return to_map(weights @ out + weights[:, :, :WIDTH])


def weights_as_signal_at_the_second_use(net, x):
    x = tokens(x)
    x = x + net.part(x, x, x)[0]
    out, weights = net.part(x, x, x)
    return to_map(out + weights[:, :, :WIDTH])


def attended_from_the_image_to_constants_at_the_second_use(net, x):
    x = tokens(x)
    x = x + net.part(x, x, x)[0]
    fixed = net.position.expand(x.shape[0], -1, -1)
    return to_map(x + net.part(x, fixed, fixed)[0])


BREAKS = {
    "weights as a signal": (weights_as_signal, plain()),
    "weights as a signal, at the second use": (weights_as_signal_at_the_second_use, plain()),
    "to constants, at the second use": (
        attended_from_the_image_to_constants_at_the_second_use,
        plain(),
    ),
    "learned keys": (by_module, plain(add_bias_kv=True)),
    "an added zero": (by_module, plain(add_zero_attn=True)),
}


@pytest.mark.parametrize(("body", "part"), BREAKS.values(), ids=BREAKS)
def test_attention_that_is_not_linear_is_an_error(body, part):
    with pytest.raises(ValueError, match="because of `MultiheadAttention` at part"):
        convert(Net(body, part=part, position=torch.rand(1, SIZE * SIZE, WIDTH)))


def encoder(**options):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (by_module, nn.MultiheadAttention(WIDTH, 2)),
        (encoded, nn.TransformerEncoderLayer(WIDTH, 2, 12)),
        (encoded, encoder()),
        (lambda net, x: x + net.part(*3 * [x.mean([2, 3])])[0][..., None, None], plain()),
    ],
    ids=["attention", "layer", "encoder", "without a batch"],
)
def test_attention_to_the_images_of_a_batch_is_an_error(body, part):
    with pytest.raises(ValueError, match=f"because of `{type(part).__name__}` at part"):
        convert(Net(body, part=part))


@pytest.mark.parametrize("part", [nn.TransformerEncoderLayer(WIDTH, 2, 12), encoder()], ids=type)
def test_attention_where_places_come_first_becomes_linear(part):
    model = convert(
        Net(lambda net, x: to_map(net.part(tokens(x).transpose(0, 1)).transpose(0, 1)), part=part)
    )
    assert_complete(model)


class UndecidedAttention(Undecided):
    def __init__(self):
        super().__init__(self.attend)
        self.part = plain()

    def attend(self, x):
        sides = x.shape[2:]
        x = tokens(x)
        return (x + self.part(x, x, x, need_weights=False)[0]).transpose(1, 2).unflatten(2, sides)


def test_attention_in_an_untraceable_network_is_replaced_whole():
    model = convert(UndecidedAttention())
    assert "Modules replaced without tracing" in model.report.note
    assert became(model, "part") == ["BcosMultiheadAttention"]
    assert became(model, "part.out_proj") == []
    assert_complete(model)


def product_by_indices(net, x, held):
    x = tokens(x)
    weights = torch.einsum("nqc,nkc->nqk", x, x).div(math.sqrt(WIDTH)).softmax(2)
    return to_map(torch.einsum("nqk,nkc->nqc", weights.detach() if held else weights, x))


def test_einsum_holds_what_is_no_signal():
    model = convert(Net(lambda net, x: product_by_indices(net, x, held=False)))
    assert_complete(model)
    constant = convert(
        Net(
            lambda net, x: torch.einsum("nchw,cd->ndhw", x, net.part), part=torch.rand(WIDTH, WIDTH)
        )
    )
    assert_complete(constant)
    with pytest.raises(ValueError, match="`einsum`"):
        convert(Net(lambda net, x: torch.einsum("nchw,nchw,nchw->nchw", x, x, x)))


def small_vit():
    return torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)


def small_swin(version):
    names = torchvision.models.swin_transformer
    block = names.SwinTransformerBlock if version == 1 else names.SwinTransformerBlockV2
    merging = names.PatchMerging if version == 1 else names.PatchMergingV2
    return torchvision.models.SwinTransformer(
        [4, 4], 8, [2, 2], [2, 4], [4, 4], num_classes=5, block=block, downsample_layer=merging
    )


def test_a_causal_mask_must_be_given():
    layer = tb.convert(small_vit(), input_size=32).network.get_submodule(
        "encoder.layers.encoder_layer_0.self_attention"
    )
    x = torch.rand(2, 5, layer.q_proj.in_features)
    with pytest.raises(ValueError, match="needs `attn_mask`"):
        layer(x, x, x, is_causal=True)


TRANSFORMERS = {
    "ViT": small_vit,
    "Swin": lambda: small_swin(1),
    "Swin V2": lambda: small_swin(2),
}


@pytest.mark.parametrize("norm", [None, "uncentred"])
@pytest.mark.parametrize("make", TRANSFORMERS.values(), ids=TRANSFORMERS)
def test_torchvisions_transformers_become_linear(make, norm):
    torch.manual_seed(0)
    module = make()
    for parameter in module.parameters():  # some begin with zeros
        nn.init.normal_(parameter, 0.1, 0.5)
    model = convert(module, norm=norm, input_size=32)
    assert_complete(model, images(2, 32))


def test_a_transformer_by_name_can_be_made_saved_and_loaded(tmp_path):
    model = tb.create_model("swin_t", num_classes=3, max_out=1, input_size=64)
    tb.calibrate(model, images(2, 64, torch.float32))
    tb.save(model, tmp_path / "m.safetensors")
    again = tb.load(tmp_path / "m.safetensors")
    x = images(1, 64, torch.float32)
    assert torch.equal(again(x), model.eval()(x))

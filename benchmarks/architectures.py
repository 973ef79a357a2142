"""Which architectures convert, and how exactly W(x)·x + bias is every logit of the result.

    python benchmarks/architectures.py                     # all; goes on where it was stopped
    python benchmarks/architectures.py --only resnet50 timm/dla34 --fresh

Each network is made with ten classes and calibrated on two smooth random images. For the first of
them all ten rows of W(x) are then computed in float32 and in float64. The measure is the largest
|residual| as a part of the largest |logit|, where the constant bias of all logits is left out.
After each network the JSON file is written anew, and the page for the documentation is made from
it at the end.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import torchbcos as tb
from torchbcos.attention import BcosMultiheadAttention, BcosShiftedWindowAttention
from torchbcos.checkpoint import write_atomically
from torchbcos.evidence import commit, device_name

ROOT = Path(__file__).resolve().parent.parent
SEED = 0
CLASSES = 10
GIANT = 250e6  # parameters of the conventional network; larger ones are left out
LEFT_OUT = "left out for its size, "
BUDGET = 1.5e9  # multiplications of one pass of the conventional network; beyond, a smaller image
SMALLER_SIZES = (128, 96, 64)
LIMITS = {"float32": 1e-4, "float64": 1e-9}

#: The paper's networks are measured at their own resolution, whatever it costs.
PAPER = {"vgg11": 224, "resnet34": 224, "inception_v3": 299, "densenet121": 224, "cifar9": 32}
TRANSFORMERS = ("vit_", "swin_", "maxvit_")  # torchvision's
TIMM_CNNS = """
    convmixer_768_32 convnext_atto convnext_atto_ols convnextv2_atto cs3darknet_s cspdarknet53
    cspresnet50 darknet53 densenetblur121d dla34 dpn68 ecaresnet50d efficientnet_lite0
    ese_vovnet19b_dw fbnetc_100 gernet_s ghostnet_100 ghostnetv2_100 hardcorenas_a hgnet_tiny
    hgnetv2_b0 hrnet_w18_small inception_next_atto inception_resnet_v2 inception_v4 lcnet_050
    legacy_xception mambaout_femto mixnet_s mobilenetv3_small_100 mobilenetv4_conv_small
    mobileone_s0 nasnetalarge nf_regnet_b0 nf_resnet50 eca_nfnet_l0 pnasnet5large rdnet_tiny
    regnety_002 regnetz_b16 repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_26w_4s resnest50d
    resnet10t resnet26d resnet50_gn resnetaa50 resnetblur50 resnetrs50 resnetv2_50 rexnet_100
    selecsls42b semnasnet_100 seresnet50 skresnet18 starnet_s1 tf_efficientnet_b0 tf_mixnet_s
    tinynet_e tresnet_m vovnet39a wide_resnet50_2 xception41
""".split()
TIMM_OTHERS = """
    bat_resnext26ts caformer_s18 cait_xxs24_224 coat_tiny convit_tiny crossvit_9_240
    deit_tiny_patch16_224 edgenext_xx_small efficientformer_l1 efficientvit_m0 fastvit_t8
    focalnet_tiny_srf gcresnet50t gmlp_ti16_224 halonet26t hiera_tiny_224 lambda_resnet26t levit_128
    mixer_s32_224 mobilevit_xxs poolformer_s12 pvt_v2_b0 resmlp_12_224 sequencer2d_s
    swin_tiny_patch4_window7_224 tnt_s_patch16_224 vit_tiny_patch16_224 volo_d1_224
    xcit_nano_12_p16_224
""".split()


def all_names() -> list[str]:
    every = torchvision.models.list_models(module=torchvision.models)
    torchvision_names = [n for n in every if n not in PAPER]
    return [*PAPER, *torchvision_names, *(f"timm/{n}" for n in [*TIMM_CNNS, *TIMM_OTHERS])]


def family(name: str) -> str:
    if name in PAPER:
        return "paper"
    if name.startswith("timm/"):
        return "timm" if name.removeprefix("timm/") in TIMM_CNNS else "timm, with attention or MLPs"
    is_transformer = name.startswith(TRANSFORMERS)
    return "torchvision, transformers" if is_transformer else "torchvision"


def conventional(name: str) -> nn.Module:
    """The network before its conversion, without weights."""

    def build() -> nn.Module:
        if name.startswith("timm/"):
            return timm.create_model(name.removeprefix("timm/"), num_classes=CLASSES)
        extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        return torchvision.models.get_model(name, num_classes=CLASSES, **extra)

    try:
        with torch.device("meta"):
            return build()
    except (NotImplementedError, RuntimeError):  # its constructor computes with tensors
        return build().to("meta")


def native_size(name: str) -> int:
    if name.startswith("timm/"):
        return timm.get_pretrained_cfg(name.removeprefix("timm/")).input_size[-1]
    transforms = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    return transforms.crop_size[0]


def affordable_size(name: str, network: nn.Module) -> int:
    """The architecture's own resolution, or the first smaller one within the budget it takes."""
    native = native_size(name)
    if name.startswith(TRANSFORMERS):
        return native
    works = native
    for size in (native, *(s for s in SMALLER_SIZES if s < native)):
        counter = FlopCounterMode(display=False)
        try:
            with counter, torch.no_grad():
                network.eval()(torch.empty(1, 3, size, size, device="meta"))
        except Exception:  # the architecture is bound to another size
            continue
        works = size
        if counter.get_total_flops() <= 2 * BUDGET:
            break
    return works


def smooth_images(count: int, size: int) -> Tensor:
    """Random colours on an 8×8 grid, interpolated: as smooth as photographs, of all colours."""
    generator = torch.Generator().manual_seed(SEED)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    return F.interpolate(coarse, (size, size), mode="bilinear")


def relative_residual(model: tb.BcosModel, images: Tensor) -> float:
    explanation = tb.explain(model, images, targets="all")
    value = (explanation.residual.abs().amax() / explanation.outputs.abs().amax()).item()
    if not value >= 0:
        raise ArithmeticError("the logits are not finite")
    return value


def measure(name: str) -> dict[str, Any]:
    """One row of the table."""
    started = time.perf_counter()
    row: dict[str, Any] = {"name": name, "family": family(name), "converts": False, "reason": ""}
    if name in PAPER:
        row["size"] = PAPER[name]
    else:
        network = conventional(name)
        parameters = sum(p.numel() for p in network.parameters())
        if parameters > GIANT:
            row["reason"] = f"{LEFT_OUT}{parameters / 1e6:.0f} M parameters"
            return row
        row["size"] = affordable_size(name, network)
    try:
        torch.manual_seed(SEED)
        model = tb.create_model(name, num_classes=CLASSES, input_size=row["size"]).eval()
        row["parameters"] = sum(p.numel() for p in model.parameters())
        row["bcos_layers"] = sum(1 for _ in model.bcos_layers())
        row["gates_held"] = gates_held(model)
        row["route"] = "modules" if "without tracing" in model.report.note else "graph"
        images = smooth_images(2, row["size"])
        tb.calibrate(model, images)
        model.logit_bias = 0.0  # adding it would hide in its rounding what we look for
        row["float32"] = relative_residual(model, images[:1])
        row["float64"] = relative_residual(model.double(), images[:1].double())
        row["converts"] = all(row[dtype] <= limit for dtype, limit in LIMITS.items())
        if not row["converts"]:
            row["reason"] = "W(x)·x + bias misses the logits"
    except Exception as error:  # whatever goes wrong is the result
        text = " ".join(str(error).split()).split(": replace that operation")[0]
        row["reason"] = text or type(error).__name__
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def gates_held(model: tb.BcosModel) -> int:
    """Products with a factor that is held constant; in a module of attention there is one."""
    kinds = (BcosMultiheadAttention, BcosShiftedWindowAttention)
    products = sum("held constant" in change.became for change in model.report.changes)
    return products + sum(isinstance(m, kinds) for m in model.modules())


def evidence() -> dict[str, Any]:
    return {
        "command": "python benchmarks/architectures.py",
        "seed": SEED,
        "platform": f"CPU: {device_name('cpu')}, {torch.get_num_threads()} thread(s)",
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "classes": CLASSES,
        "limits": LIMITS,
    }


def line_of(row: dict[str, Any]) -> str:
    start = f"{row['name']:<36}"
    if not row["converts"]:
        return f"{start} no: {row['reason'][:160]}"
    return (
        f"{start} {row['size']:>4} px  {row['parameters'] / 1e6:6.1f} M  float32 "
        f"{row['float32']:.1e}  float64 {row['float64']:.1e}  {row.get('seconds', 0):.0f} s"
    )


ASTERISK = (
    " An asterisk marks networks whose code could not be traced, so that modules were replaced one "
    "by one and the result was checked by numbers."
)


def page(rows: list[dict[str, Any]], evidence: dict[str, Any]) -> str:
    """The documentation's page."""
    good = [row for row in rows if row["converts"]]
    bad = [row for row in rows if not row["converts"] and not _giant(row)]
    giants = [row for row in rows if _giant(row)]
    count = {f: sum(row["family"] == f for row in good) for f in dict.fromkeys(map(_family, rows))}
    lines = [
        "# Architectures that convert",
        "",
        "Each network was made with ten classes, converted, and calibrated on two smooth random "
        "images; then W(x)·x + bias was compared with all ten logits of the first image, once in "
        "float32 and once in float64. The two residual columns give the largest difference as a "
        "part of the largest logit without its bias: the limits are "
        f"{LIMITS['float32']:.0e} and {LIMITS['float64']:.0e}.",
        "",
        f"{len(good)} of the {len(good) + len(bad)} networks that were tried convert ("
        + "; ".join(f"{name}: {n}" for name, n in count.items())
        + ")"
        + (f"; {len(giants)} more were left out for their size" if giants else "")
        + ". Networks that are slow on a processor were measured on images smaller than those "
        "they were designed for; the paper's never were. "
        "`gates held` counts the products with a factor that depends on the input, which is held "
        "constant in an explanation, attention weights among them."
        + (ASTERISK if any(row["route"] == "modules" for row in good) else ""),
        "",
        "| architecture | pixels | parameters | B-cos layers | gates held | float32 | float64 |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in good:
        mark = " \\*" if row["route"] == "modules" else ""
        lines.append(
            f"| {row['name']}{mark} | {row['size']} | {row['parameters'] / 1e6:.1f} M | "
            f"{row['bcos_layers']} | {row['gates_held']} | {row['float32']:.0e} | "
            f"{row['float64']:.0e} |"
        )
    lines += ["", "## What does not convert, and why", ""]
    lines += [f"- {row['name']}: {_short(row['reason'])}." for row in bad]
    if giants:
        lines += ["", "## Not tried, for their size", ""]
        lines += [f"- {row['name']}: {row['reason'].removeprefix(LEFT_OUT)}." for row in giants]
    versions = ", ".join(f"{k} {evidence[k]}" for k in ("torch", "torchvision", "timm"))
    lines += [
        "",
        f"Made by `{evidence['command']}` with {versions}, seed {evidence['seed']}, "
        f"{evidence['platform']}; the numbers are in `results/architectures.json`.",
        "",
    ]
    return "\n".join(lines)


def _short(reason: str) -> str:
    return (reason if len(reason) <= 300 else reason[:300].rpartition(" ")[0] + " …").rstrip(".")


def _giant(row: dict[str, Any]) -> bool:
    return row["reason"].startswith(LEFT_OUT)


def _family(row: dict[str, Any]) -> str:
    return row["family"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")
    parser.add_argument("--threads", type=int, default=1, help="of torch; 1 suits a busy machine")
    parser.add_argument("--out", type=Path, default=ROOT / "results/architectures.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs/architectures.md")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")

    known = all_names()
    wanted = arguments.only or known
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        print(
            f"`--only` (={' '.join(unknown)}) is not in the list of {len(known)}.", file=sys.stderr
        )
        sys.exit(2)
    rows: dict[str, dict[str, Any]] = {}
    if arguments.out.is_file():
        rows = {row["name"]: row for row in json.loads(arguments.out.read_text())["networks"]}
    proof, source = evidence(), commit()
    for name in wanted:
        if name in rows and not arguments.fresh:
            continue
        rows[name] = {**measure(name), "commit": source}
        print(line_of(rows[name]), flush=True)
        ordered = [rows[n] for n in known if n in rows]
        content = json.dumps({"evidence": proof, "networks": ordered}, indent=1, ensure_ascii=False)
        write_atomically(arguments.out, f"{content}\n".encode())
        gc.collect()
    ordered = [rows[n] for n in known if n in rows]
    write_atomically(arguments.docs, page(ordered, proof).encode())
    print(f"{sum(row['converts'] for row in ordered)} of {len(ordered)} convert")


if __name__ == "__main__":
    main()

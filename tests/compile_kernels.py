"""Compile every kernel for a GPU that need not be there; run by test_triton in its own process."""

import inspect

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchbcos.ops import augment_kernels, kernels, map_kernels, norm_kernels

CONSTANTS = {
    "TAPS_H": 3,
    "TAPS_W": 3,
    "BLOCK_M": 64,
    "BLOCK_C": 64,
    "BLOCK": 1024,
    "KEEP": True,
    "FROZEN": False,
    "NORMS": True,
    "HAS_WEIGHT": True,
    "HAS_BIAS": True,
    "TRACKED": True,
}
VARIANTS = [
    {"UNITS": units, "QUARTERS": quarters, "WHOLE": whole, **groups}
    for units, quarters, whole, groups in (
        (1, -1, True, {"outer": 1, "inner": 1, "SQUARE": False}),
        (2, 0, False, {"outer": 1, "inner": 1, "SQUARE": False}),
        (1, 4, False, {"outer": 1, "SQUARE": True}),  # what is not given is no constant
        (2, 7, True, {"inner": 1, "SQUARE": False}),
    )
]
POINTERS = {
    "weight", "rows", "grad_rows", "grad", "x", "sq", "a", "out", "out_sq", "lin",
    "lin_grad", "sq_norm_grad", "x_grad", "parts", "sums", "mean", "variance", "inverse", "bias",
    "running", "weight_grad",
}  # fmt: skip
FLOAT32 = {
    "sq", "out_sq", "sq_norm_grad", "parts", "sums", "mean", "variance", "inverse", "weight",
    "bias", "numbers", "found", "running", "weight_grad",
}  # fmt: skip


def signature(kernel, constants):
    kinds = {}
    of_images = kernel in vars(augment_kernels).values()
    for name in inspect.signature(kernel.fn).parameters:
        if name in constants:
            kinds[name] = "constexpr"
        elif name == "winner":
            kinds[name] = "*i8"
        elif name in FLOAT32 or (of_images and name in ("x", "out")):
            kinds[name] = "*fp32"
        elif name in POINTERS or (name == "b" and kernel is map_kernels.add):
            kinds[name] = "*bf16"
        elif name in ("b", "scale", "eps", "momentum", "levels"):
            kinds[name] = "fp32"
        else:
            kinds[name] = "i32"
    return kinds


def main():
    modules = (kernels, map_kernels, norm_kernels, augment_kernels)
    for kernel in (k for module in modules for k in vars(module).values()):
        if not isinstance(kernel, triton.runtime.JITFunction) or kernel.fn.__name__[0] == "_":
            continue
        names = list(inspect.signature(kernel.fn).parameters)
        seen = set()
        for variant in VARIANTS:
            constants = {n: v for n, v in (CONSTANTS | variant).items() if n in names}
            if tuple(constants.items()) in seen:
                continue
            seen.add(tuple(constants.items()))
            source = ASTSource(kernel, signature(kernel, constants), constants)
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
            assert made.asm["ptx"]
        print(kernel.fn.__name__, len(seen))  # noqa: T201


if __name__ == "__main__":
    main()

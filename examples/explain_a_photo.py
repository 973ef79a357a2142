"""Explain a photo with a bundled model: every score is W(x)·x + bias, up to float32 rounding."""

from pathlib import Path

import torchbcos as tb
from torchbcos.images import read_image

HERE = Path(__file__).parent
out = Path("out/explain_a_photo")

model = tb.load("imagenette")
image = read_image(HERE / "photos" / "church.jpg", model.input_size)[None]  # [1, 3, 224, 224]

e = tb.explain(model, image, targets=["church", "garbage truck"])
print(e)
for k, name in enumerate(["church", "garbage truck"]):
    pixels, bias = e.contributions[0, k].sum().item(), e.bias[0, k].item()
    print(f"{name}: {pixels:.4f} from the pixels {bias:+.4f} = {e.outputs[0, k].item():.4f}")

out.mkdir(parents=True, exist_ok=True)
tb.render.figure(image, e).savefig(out / "figure.png", dpi=120)
print(f"Look at {out / 'figure.png'}")

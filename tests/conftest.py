import os

import hypothesis
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

hypothesis.settings.register_profile(
    "reproducible",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("reproducible")

torch.set_num_threads(1)  # the tensors are tiny, and xdist already fills the cores

"""Settings that belong to the process, in processes of their own."""

import subprocess
import sys

import pytest

CHECK = """
import torch
from torchbcos._cuda import cuda_settings

{before}

cudnn, cuda, mkldnn = torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn

def state():
    found = [cudnn.benchmark] + [
        p.fp32_precision for p in (torch.backends, cudnn.conv, cudnn.rnn, cuda, mkldnn.matmul)
    ]
    product = torch.get_float32_matmul_precision
    for ask in (lambda: cudnn.allow_tf32, lambda: cuda.allow_tf32, product):
        try:
            found.append(ask())
        except RuntimeError:  # torch's answer where switches and precisions were mixed
            found.append(None)
    return found

before = state()
for tf32 in (True, False):
    with cuda_settings(tf32=tf32, benchmark=True):
        assert (cudnn.allow_tf32, cuda.allow_tf32, cudnn.benchmark) == (tf32, tf32, True)
        assert cudnn.conv.fp32_precision == cuda.fp32_precision == ("tf32" if tf32 else "ieee")
    assert all(b in (a, None) for a, b in zip(state(), before)), (before, state())
"""


@pytest.mark.parametrize(
    "before",
    [
        "",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    ],
)
def test_settings_are_given_back_however_they_were_made(before):
    script = CHECK.format(before=before)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr

"""Small optimizers, parameters and gradients for the tests of resets.

The steps run on the reference backend; kernels equal it to the bit (test_kernel.py).
"""

import torch

import masterless as ml

SHAPE = (8, 160)
FORMATS = ["fp32", "bf16", "fp8", "fp4", "uint8", "log8", "log4", "log2", "factored"]


def adamw(p, **options):
    options = {"lr": 1e-3, "weight_decay": 0.0, "exp_avg": "fp32", "backend": "reference", **options}
    return ml.AdamW([("w", p)], **options)


def parameter(shape=SHAPE, seed=0):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def gradients(steps, shape=SHAPE, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def run(opt, p, grads):
    for g in grads:
        p.grad = g.clone()
        opt.step()


def update_size(opt, p, g):
    """R.m.s. of the update that one step makes."""
    before = p.detach().clone()
    run(opt, p, [g])
    return float((p.detach() - before).square().mean().sqrt())


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

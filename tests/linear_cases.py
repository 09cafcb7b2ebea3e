"""linear's shapes and operands, and one step of it."""

import torch

# (batch, in, out) and why
SHAPES = [
    ((), 5, 3),  # one vector
    ((1,), 1, 1),
    ((2, 3), 4, 5),  # leading dimensions fold
    ((65,), 33, 67),  # odd everything: no operand has aligned rows
    ((64,), 3136, 128),  # the MNIST CNN: k is long, the output small
    ((64,), 128, 10),  # ... and its last layer
    ((200,), 72, 136),  # aligned rows, ragged tiles
    ((1, 257), 64, 1),
    ((7, 1, 3), 200, 264),
]
# Large enough for every tile of the CUDA path, and for split-k.
CUDA_SHAPES = [
    ((2048,), 512, 2048),
    ((1000,), 520, 1032),
    ((512,), 3136, 128),
    ((16,), 4096, 4096),
    ((4096,), 136, 8),
    # float32, few rows: each count of them, ragged columns, a k that not every warp takes part in
    ((1,), 4096, 4096),
    ((2,), 72, 40),
    ((3,), 1032, 264),
    ((8,), 2056, 1003),
    ((9,), 8, 24),
    ((1,), 16384, 8),  # too long for so few columns
    # sm_90a: ragged tiles of each size; rows of the output that TMA cannot store
    ((2000,), 520, 2056),
    ((2040,), 4096, 2040),  # the largest tile of TF32, forward and gradient of the weight
    ((1000,), 1000, 1008),
    ((520,), 1160, 1003),
    ((200,), 2056, 264),
    ((4000,), 520, 136),  # clusters of two, as the shapes of 1000 rows
    ((760,), 760, 760),  # ... of four
    # operands that TMA cannot load: both of a product, one of them; k of one stage, of many
    ((1023,), 1001, 515),
    ((640,), 776, 333),
    ((640,), 333, 776),
    ((4100,), 9, 1030),
    ((130,), 4099, 132),
    ((4100,), 9, 4099),
    ((1023,), 9, 4099),
    ((96,), 1003, 4099),
    ((96,), 1003, 1030),
    # ... that are copied to aligned rows first, or whose dy is
    ((4096,), 1025, 1027),
    ((2048,), 768, 5003),
    ((64,), 2048, 2050),
    # few rows, and enough of a weight that its gradient in 16 bits is an outer product
    ((1,), 1096, 1032),
    ((31,), 1032, 1288),
    ((96,), 2056, 520),
    # a classifier's head: as large as its kernels take it, one beyond each limit
    ((512,), 1024, 16),
    ((301,), 200, 3),
    ((40,), 1, 16),  # one feature: contiguous across
    ((513,), 130, 10),
    ((512,), 130, 17),
    ((512,), 1025, 10),
]


def operands(device, dtype, batch, in_features, out_features, bias=True, integers=False):
    shapes = [(*batch, in_features), (out_features, in_features), (out_features,)]
    result = [
        (torch.randint(-3, 4, s, device=device) if integers else torch.randn(s, device=device))
        .to(dtype)
        .requires_grad_()
        for s in shapes
    ]
    return result if bias else [*result[:2], None]


def step(function, inputs):
    """Output and all gradients, from a cotangent of small integers."""
    output = function(*inputs)
    cotangent = (torch.arange(output.numel(), device=output.device) % 5 - 2).to(output.dtype)
    leaves = [t for t in inputs if t is not None]
    return [output, *torch.autograd.grad(output, leaves, cotangent.view(output.shape))]


def unsigned_zeros(tensors):
    """A sum of one product may be that product, -0, or be added to 0."""
    return [t + 0 for t in tensors]


def assert_func_transforms_agree(device, ours, theirs):
    """torch.func on two functions of an input, a weight and a bias."""
    f64 = {"device": device, "dtype": torch.float64}
    x, w, b = torch.randn(3, 4, **f64), torch.randn(5, 4, **f64), torch.randn(5, **f64)
    func = torch.func
    for transform in (
        lambda f: func.grad(lambda *a: f(*a).sin().sum(), argnums=(0, 1, 2))(x, w, b),
        lambda f: func.vjp(f, x, w, b)[1](torch.ones(3, 5, **f64)),
        lambda f: func.jvp(f, (x, w, b), (x.cos(), w.cos(), b.cos())),
        lambda f: func.jvp(lambda t: f(x, t), (w,), (w.cos(),)),
        lambda f: func.jvp(lambda t: f(x, w, t), (b,), (b.cos(),)),
        lambda f: func.jacrev(f, argnums=(0, 1, 2))(x, w, b),
        lambda f: func.jacfwd(f, argnums=(0, 1, 2))(x, w, b),
        lambda f: func.vmap(f, in_dims=(0, None, None))(x, w, b),
        lambda f: func.vmap(lambda t: func.grad(lambda u: f(t, u).pow(2).sum())(w))(x),
        lambda f: func.hessian(lambda t: f(x, t, b).pow(3).sum())(w),
        lambda f: func.grad(lambda t: func.grad(lambda u: f(x, u, b).pow(2).sum())(t).sum())(w),
        lambda f: func.jvp(func.grad(lambda t: f(x, t, b).pow(2).sum()), (w,), (w.cos(),)),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))

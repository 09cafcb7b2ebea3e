"""One small case for each CUDA kernel variant, to be run under compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        --padding 64 --kernel-name-exclude kns=nvjet python tools/sanitize_cases.py [FILTER]

Without that variable an out-of-bounds access lands in the same slab and goes unseen. Each case
prints its name before it runs and is compared with the CPU kernel afterwards. Sizes sit one past a
tile or vector edge, where an over-read would be. FILTER: a regular expression, only cases in whose
name it is found ("^linear-.*float16$").
Without a GPU the CPU kernels run twice, which checks this file.
"""

import re
import sys

import torch
from sanitize_parts import attention, images, pointwise, products, rows
from sanitize_parts.common import DEVICE, rand

import warpwright
import warpwright.functional as F

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9, torch.bfloat16: 6e-2, torch.float16: 1e-2}
WITHOUT_FLOAT64 = {"linear_8bit"}
ONLY_16_BITS = {
    "conv2d_walk",
    "gated_dgrad",
    "narrow_backward",
}  # and TF32: the other kernels have smaller cases


CASES = {
    "mlp": products.mlp_cases,
    "joined_dgrad": images.joined_dgrad_cases,
    "gated_dgrad": images.gated_dgrad_cases,
    "narrow_backward": images.narrow_backward_cases,
    "attention_varlen": attention.packed_cases,
    "attention_with_kv_cache": attention.decoding_cases,
    "optim": pointwise.optimizer_cases,
    "activation": pointwise.activation_cases,
    "dropout": pointwise.dropout_cases,
    "relu": pointwise.relu_cases,
    "gated_activation": pointwise.gated_activation_cases,
    "layer_scale_add": pointwise.layer_scale_add_cases,
    "squeeze_excitation": pointwise.squeeze_excitation_cases,
    "rotary_embedding": pointwise.rotary_embedding_cases,
    "cumsum": rows.cumsum_cases,
    "product_scan": rows.product_scan_cases,
    "reduction": rows.reduction_cases,
    "linear_scan": rows.linear_scan_cases,
    "linear_quantized": products.linear_quantized_cases,
    "group_norm": images.group_norm_cases,
    "embedding": rows.embedding_cases,
    "softmax": rows.softmax_cases,
    "adaptive_avg_pool2d": images.adaptive_avg_pool2d_cases,
    "max_pool2d": images.max_pool2d_cases,
    "batch_norm_relu_max_pool2d": images.batch_norm_relu_max_pool2d_cases,
    "batch_norm": images.batch_norm_cases,
    "row_norm": rows.row_norm_cases,
    "linear_8bit": products.linear_8bit_cases,
    "linear": products.linear_cases,
    "linear_activation": products.linear_activation_cases,
    "fft_conv": images.fft_conv_cases,
    "conv2d": images.conv2d_cases,
    "conv2d_walk": images.conv2d_walk_cases,
    "conv_transpose2d": images.conv_transpose2d_cases,
    "conv2d_batch_norm": images.conv2d_batch_norm_cases,
    "conv2d_batch_norm_relu_max_pool2d": images.conv2d_batch_norm_relu_max_pool2d_cases,
    "cross_entropy": rows.cross_entropy_cases,
    "linear_cross_entropy": products.linear_cross_entropy_cases,
    "attention": attention.attention_cases,
}


def step(function, args, kwargs, device, dtype):
    """Output, and the gradient of every floating argument, on `device` in `dtype`."""
    moved = []
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.is_floating_point():
            # Rounded to dtype first, so that both devices start from the same numbers.
            moved.append(arg.to(dtype).to(device).requires_grad_())
        else:
            moved.append(arg.to(device) if isinstance(arg, torch.Tensor) else arg)
    output = function(*moved, **kwargs)
    torch.manual_seed(1)
    cotangent = torch.randn(output.shape, dtype=torch.float64).to(dtype).to(device)
    leaves = [t for t in moved if isinstance(t, torch.Tensor) and t.requires_grad]
    grads = ()
    if output.requires_grad:
        grads = torch.autograd.grad(output, leaves, cotangent, allow_unused=True)
    return [t.detach().cpu().double() for t in (output, *grads) if t is not None]


def differences(on_gpu, on_cpu, tolerance):
    """A line for each result that differs from the CPU's by more than the tolerance."""
    for i, (a, b) in enumerate(zip(on_gpu, on_cpu, strict=True)):
        if not torch.equal(a.isfinite(), b.isfinite()):
            yield f"result {i} is not finite at other places than the CPU's"
            continue
        a, b = a[a.isfinite()], b[b.isfinite()]
        scale = b.abs().max().item() if b.numel() else 0.0
        error = (a - b).abs().max().item() if b.numel() else 0.0
        if not error <= tolerance * max(scale, 1.0):
            yield f"result {i} differs from the CPU by {error:.3e} (largest {scale:.3e})"


def main():
    wanted = re.compile(sys.argv[1] if len(sys.argv) > 1 else "").search
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    count, wrong = 0, []

    def check(name, function, args, kwargs, dtype, tolerance):
        print(name, flush=True)
        on_gpu = step(function, args, kwargs, DEVICE, dtype)
        on_cpu = step(function, args, kwargs, "cpu", dtype)
        for line in differences(on_gpu, on_cpu, tolerance):
            print(f"  {line}", flush=True)
            wrong.append(f"{name}: {line}")

    for op, cases in CASES.items():
        torch.manual_seed(0)
        dtypes = [d for d in DTYPES if d != torch.float64 or op not in WITHOUT_FLOAT64]
        if op in ONLY_16_BITS:
            dtypes = [torch.bfloat16, torch.float16]
        for case, function, args, kwargs in cases():
            for dtype in dtypes:
                name = f"{op}-{case}-{str(dtype).removeprefix('torch.')}"
                if wanted(name):
                    check(name, function, args, kwargs, dtype, TOLERANCE[dtype])
                    count += 1
    warpwright.set_float32_matmul_precision("high")
    for op in ("linear", "linear_activation"):
        torch.manual_seed(0)
        for case, function, args, kwargs in CASES[op]():
            name = f"{op}-{case}-3xtf32"
            if wanted(name):
                check(name, function, args, kwargs, torch.float32, TOLERANCE[torch.float32])
                count += 1
    warpwright.set_float32_matmul_precision(None)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for op in ("linear", "linear_activation", "conv2d", "conv2d_walk"):
        torch.manual_seed(0)
        for case, function, args, kwargs in CASES[op]():
            name = f"{op}-{case}-tf32"
            if wanted(name):
                check(name, function, args, kwargs, torch.float32, 2e-2)
                count += 1
    q, k, v = (rand(1, 2, 65, 32).float().to(DEVICE).requires_grad_() for _ in range(3))
    if wanted("attention-dropout"):
        print("attention-dropout", flush=True)
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).sum().backward()
        count += 1
    if wanted("cross_entropy-bad-label"):
        print("cross_entropy-bad-label", flush=True)
        x = rand(4, 10).float().to(DEVICE).requires_grad_()
        try:
            F.cross_entropy(x, torch.tensor([1, 10, -5, 2**40], device=DEVICE)).backward()
            warpwright.check_errors()
        except IndexError as error:
            print(f"  as it should: {error}")
        else:
            sys.exit("cross_entropy: a bad label raised no IndexError")
        count += 1
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{count} cases, {len(wrong)} wrong results", *wrong, sep="\n  ")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

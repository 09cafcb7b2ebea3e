"""A course's claim: convolution by FFT is 208 times faster (batch 1, kernel 128, image 2048). Than what?

    python benchmarks/fft_claim.py

Prints the time of a naive CUDA kernel, of native's convolution, of the products at the FMA peak (a
floor, not measured), of a chain of torch.fft calls, and of `fft_conv2d`, all in float32.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import warpwright.functional as F
from warpwright.bench.fft_cases import fast_size

IMAGE, TAPS = 2048, 128
RESULTS = IMAGE - TAPS + 1
FMA_FLOPS_PER_CYCLE = 2 * 128  # of an SM

NAIVE = """
extern "C" __global__ void naive(const float* x, const float* w, float* y) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= %(results)d || col >= %(results)d) return;
  float sum = 0;
  for (int r = 0; r < %(taps)d; ++r) {
    for (int s = 0; s < %(taps)d; ++s) {
      sum += x[(row + r) * %(image)d + col + s] * w[r * %(taps)d + s];
    }
  }
  y[row * %(results)d + col] = sum;
}
"""


def milliseconds(run: Callable[[], Tensor], repeats: int = 7) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    torch.backends.cudnn.allow_tf32 = False
    x = torch.randn(1, 1, IMAGE, IMAGE, device="cuda")
    w = torch.randn(1, 1, TAPS, TAPS, device="cuda")
    sizes = {"image": IMAGE, "taps": TAPS, "results": RESULTS}
    kernel = torch.cuda._compile_kernel(NAIVE % sizes, "naive")
    y = torch.empty(1, 1, RESULTS, RESULTS, device="cuda")

    def naive() -> Tensor:
        blocks = -(-RESULTS // 32), -(-RESULTS // 8), 1
        kernel(blocks, (32, 8, 1), (x, w, y))
        return y

    def native() -> Tensor:
        return torch.nn.functional.conv2d(x, w)

    def chain() -> Tensor:
        n = fast_size(IMAGE)
        spectrum = torch.fft.rfft2(x, s=(n, n)) * torch.fft.rfft2(w, s=(n, n)).conj()
        return torch.fft.irfft2(spectrum, s=(n, n))[..., :RESULTS, :RESULTS]

    def ours() -> Tensor:
        return F.fft_conv2d(x, w)

    exact = torch.nn.functional.conv2d(x.double(), w.double())
    properties = torch.cuda.get_device_properties(0)
    clock = getattr(properties, "clock_rate", 1_980_000) * 1e3
    flops = 2.0 * RESULTS**2 * TAPS**2
    floor = flops / (properties.multi_processor_count * FMA_FLOPS_PER_CYCLE * clock)
    times = {"FMA floor": 1e3 * floor}
    for run in (naive, native, chain, ours):
        error = float((run() - exact).abs().max() / exact.abs().max())
        times[run.__name__] = milliseconds(run)
        print(f"{run.__name__:<8} error {error:.1e}")
    print(f"\n{properties.name}, batch 1, kernel {TAPS}, image {IMAGE}, float32")
    for name, time in sorted(times.items(), key=lambda item: -item[1]):
        print(f"  {name:<10} {time:8.3f} ms, {time / times['ours']:6.1f} x fft_conv2d")


if __name__ == "__main__":
    main()

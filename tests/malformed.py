"""Seeded random malformed calls, of the public functions and of the raw ops, in child processes.

A call starts valid and gets one or two faults: a wrong rank, size, dtype, layout, device, Python type
or number, storage that was freed, None. Call `i` of a seed is the same on every machine. A child
announces each call before it makes it, so that a death or a hang has a name. Public functions run
natively too, in children of their own: a death of native's is not ours.

    python tests/malformed.py --kind raw --device cpu --calls 5000
"""

import argparse
import json
import os
import random
import re
import resource
import select
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from gpu_sharing import without_mps
from malformed_calls import describe, keep, native_functions, public_calls, raw_calls
from torch.utils._pytree import tree_leaves, tree_map

SECONDS_PER_CALL = 60
CHILD_BYTES = 6 << 30  # an allocation beyond this raises, as it would on a full machine
CUDA_FAULT = ("CUDA error", "CUDA driver error")

# ---- faults ----

OTHER_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
INTS = [0, 1, -1, 2, 3, 7, -100, 255, 65536, 10**6, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63)]
NO_INTS = [2**63, 1.5, "1", None, True, [], [1, 2], (1, 2, 3)]
FLOATS = [0.0, 1.0, -1.0, 0.5, 2.0, 1e-300, 1e308, float("nan"), float("inf"), -float("inf")]
NO_FLOATS = [None, "0.5", [0.5], 1, 2**63, True]
NO_BOOLS = [None, 0, 2, 0.5, "no", []]
STRINGS = ["mean", "sum", "none", "same", "valid", "relu", "gelu", "silu", "", "x" * 100, None, 1]
NO_TENSORS = [None, 1, 1.5, "tensor", [], [1.0, 2.0], (), {}]


def other_values(x, rng):
    """Numbers at the ends of the type, or beyond what an index may be."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        number = rng.choice([float("nan"), float("inf"), -1e30, 0.0])
        return torch.full(x.shape, number, device=x.device).to(x.dtype)
    if x.dtype == torch.bool:
        return ~x
    info = torch.iinfo(x.dtype)
    return torch.full_like(x, rng.choice([info.max, info.min, info.max // 2, 7]))


def other_size(x, rng):
    if x.dim() == 0:
        return x.new_zeros(rng.choice([(0,), (1,), (2,), (1, 1)]))
    sizes = list(x.shape)
    d = rng.randrange(x.dim())
    sizes[d] = max(0, rng.choice([sizes[d] + 1, sizes[d] - 1, 2 * sizes[d], 1, 0]))
    return torch.zeros(sizes, dtype=x.dtype, device=x.device)


def other_rank(x, rng):
    choice = rng.randrange(4)
    if choice == 0:
        return x.unsqueeze(rng.randrange(x.dim() + 1))
    if choice == 1:
        return x.reshape(-1)
    if choice == 2 and x.dim() > 0 and x.shape[0] > 0:
        return x[0]
    return x.new_zeros(())


def other_layout(x, rng):
    """The same sizes over overlapping, repeated, permuted, sparse or misaligned memory."""
    if x.dim() == 0:
        return x
    choice = rng.randrange(6)
    sizes = list(x.shape)
    if choice == 0:  # every stride 1: elements share memory
        return torch.ones(sum(sizes) + 1, dtype=x.dtype, device=x.device).as_strided(
            sizes, [1] * x.dim()
        )
    if choice == 1:
        return torch.ones([1] * x.dim(), dtype=x.dtype, device=x.device).expand(sizes)
    if choice == 2:
        order = list(range(x.dim()))
        rng.shuffle(order)
        back = [order.index(i) for i in range(x.dim())]
        return x.permute(order).contiguous().permute(back)
    if choice == 3:
        wide = x.repeat_interleave(2, dim=-1)
        return wide[..., ::2]
    if choice == 4:
        flat = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
        return flat[1:].view(sizes).copy_(x)
    return x.mT if x.dim() >= 2 else x.flip(0)


def freed(x, rng):
    """Storage of no bytes, or of half of what the sizes need."""
    x = x.detach().clone()
    size = x.untyped_storage().nbytes()
    x.untyped_storage().resize_(rng.choice([0, 0, size // 2]))
    return x


def freed_in_another_form(x, rng):
    """A layout or a type that a kernel copies or casts first, without its memory."""
    x = x.detach()
    x = other_layout(x, rng) if rng.random() < 0.5 else x.to(rng.choice(OTHER_DTYPES))
    storage = x.untyped_storage()
    storage.resize_(rng.choice([0, storage.nbytes() // 2]))
    return x


def elsewhere(x, rng):
    if x.is_cuda and rng.random() < 0.7:
        return x.detach().cpu()
    return x.detach().to("meta")


def sparse(x):
    """`x` as it is if it can't be sparse: a scalar, or 8-bit floats, whose zeros native can't find."""
    return x.to_sparse() if x.dim() > 0 and x.dtype != torch.float8_e4m3fn else x


def other_kind(x, rng):
    choice = rng.randrange(4)
    if choice == 0:
        return sparse(x.detach())
    if choice == 1:
        return x.detach().clone().requires_grad_(x.dtype.is_floating_point)
    if choice == 2:
        return torch.nn.Parameter(x.detach(), requires_grad=False)
    x = x.detach()
    if x.dtype not in (torch.float32, torch.float64):
        return sparse(x)
    return torch.complex(x, x).conj().imag  # the negative of its memory


TENSOR_FAULTS = [
    (other_values, 2),
    (other_size, 5),
    (other_rank, 3),
    (other_layout, 4),
    (freed, 2),
    (freed_in_another_form, 2),
    (elsewhere, 2),
    (other_kind, 1),
    (lambda x, rng: x.to(rng.choice(OTHER_DTYPES)), 3),
    (lambda x, rng: rng.choice(NO_TENSORS), 2),
]


def bad_tensor(x, rng):
    faults, weights = zip(*TENSOR_FAULTS, strict=True)
    return rng.choices(faults, weights)[0](x, rng)


def bad_list(values, rng):
    values = list(values)
    choice = rng.randrange(6)
    if choice == 0 and values:
        values.pop(rng.randrange(len(values)))
    elif choice == 1:
        values.append(values[-1] if values else 1)
    elif choice == 2:
        return []
    elif choice == 3:
        return rng.choice([None, 1, "list"])
    elif values:
        i = rng.randrange(len(values))
        values[i] = bad(values[i], rng)
    return values


def bad(value, rng):
    """`value` with a fault."""
    if isinstance(value, torch.Tensor):
        return bad_tensor(value, rng)
    if isinstance(value, bool):
        return rng.choice([not value, *NO_BOOLS])
    if isinstance(value, int):
        return rng.choice(INTS) if rng.random() < 0.7 else rng.choice(NO_INTS)
    if isinstance(value, float):
        return rng.choice(FLOATS) if rng.random() < 0.7 else rng.choice(NO_FLOATS)
    if isinstance(value, (list, tuple)):
        return bad_list(value, rng)
    if isinstance(value, torch.dtype):
        return rng.choice([*OTHER_DTYPES, None, 6, -1, 99])
    if isinstance(value, str):
        return rng.choice(STRINGS)
    return rng.choice([None, 0, -1, 1.5, "x", torch.zeros(()), torch.ones(3)])  # was None


def make_malformed(args, kwargs, rng):
    args, kwargs = list(args), dict(kwargs)
    places = [*range(len(args)), *kwargs]
    faults = rng.sample(places, min(len(places), rng.choice([1, 1, 2])))
    for place in faults:
        target = args if isinstance(place, int) else kwargs
        target[place] = bad(target[place], rng)
    return args, kwargs, len(faults)


# ---- one call, in a child ----


class Calls:
    """Call `i` of a campaign: its name, function, arguments and number of faults."""

    def __init__(self, campaign):
        self.campaign = campaign
        self.functions = native_functions() if campaign.native else None
        raw = campaign.kind == "raw"
        self.valid = raw_calls(campaign.device) if raw else public_calls("cpu", 0)
        self.names = [name for name in self.valid if re.search(campaign.only, name)]

    def make(self, i):
        rng = random.Random(self.campaign.seed * 1_000_003 + i)
        torch.manual_seed(i)
        name = self.names[i % len(self.names)]
        if self.campaign.kind == "raw":
            args = tree_map(keep, rng.choice(self.valid[name]))
            function = getattr(torch.ops.warpwright, name).default
            return name, function, *make_malformed(args, {}, rng)
        valid = public_calls(self.campaign.device, rng.randrange(1000), rng.random() < 0.5)
        return name, self.function(name), *make_malformed(*valid[name], rng)

    def function(self, name):
        if self.functions is not None:
            return self.functions.get(name)
        from warpwright import functional

        return getattr(functional, name)


def run(function, args, kwargs):
    """The name of what the call raised, or "ok"; also of its backward, if it has one."""
    try:
        results = tree_leaves(function(*args, **kwargs))
        results = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(r) for r in results])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # which one is the answer
        return type(error).__name__, str(error).split("\n")[0][:300]
    return "ok", ""


def child(campaign, pipe):
    """Writes a line before and a line after each call."""
    if campaign.device == "cpu" and campaign.limit_memory:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + CHILD_BYTES, -1))
    if campaign.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CHILD_BYTES / total))
    torch.set_num_threads(2)
    calls = Calls(campaign)

    def say(**line):
        os.write(pipe, (json.dumps(line) + "\n").encode())

    for i in range(campaign.first, campaign.first + campaign.calls):
        name, function, args, kwargs, faults = calls.make(i)
        if function is None:
            say(i=i, result="none", message="")
            continue
        call = f"{name}({tree_map(describe, args)}, {tree_map(describe, kwargs)})"
        say(i=i, call=call, faults=faults)
        if i == campaign.fatal:
            os.abort()
        result, message = run(function, args, kwargs)
        if any(fault in message for fault in CUDA_FAULT):
            say(i=i, fault=message)
            os._exit(1)
        say(i=i, result=result, message=message)


# ---- the parent ----


@dataclass
class Campaign:
    kind: str = "raw"  # or "public"
    device: str = "cpu"
    first: int = 0
    calls: int = 500
    seed: int = 0
    only: str = ""  # regular expression of names
    native: bool = False  # native's functions
    limit_memory: bool = True  # not under AddressSanitizer, which maps terabytes
    fatal: int = -1  # this call aborts: the test of the harness


@dataclass
class Outcome:
    calls: dict = field(default_factory=dict)  # number -> description
    faults: dict = field(default_factory=dict)  # number -> how many the call has
    results: dict = field(default_factory=dict)  # number -> (exception or "ok", message)
    deaths: list = field(default_factory=list)  # "call: how"


def run_campaign(campaign):
    """Every call, in as many children as it takes."""
    outcome = Outcome()
    end = campaign.first + campaign.calls
    first = campaign.first
    while first < end:
        with tempfile.TemporaryFile() as errors:
            first = Child(
                replace(campaign, first=first, calls=end - first), outcome, errors
            ).follow()
    return outcome


class Child:
    """A process that makes the calls of a campaign until one ends it."""

    def __init__(self, campaign, outcome, errors):
        self.outcome, self.errors = outcome, errors
        self.running, self.faulted, self.hung = None, False, False
        self.first = self.next = campaign.first
        self.pipe, write = os.pipe()
        command = [sys.executable, __file__, "--child", str(write), json.dumps(asdict(campaign))]
        self.process = subprocess.Popen(
            command,
            pass_fds=[write],
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env=without_mps(),
        )
        os.close(write)

    def follow(self):
        """Returns the first call that is left: the campaign's end, or the one after a death."""
        buffer = b""
        seconds = 5 * SECONDS_PER_CALL  # the imports
        while True:
            if not select.select([self.pipe], [], [], seconds)[0]:
                self.hung = True
                self.process.kill()
                break
            seconds = SECONDS_PER_CALL
            chunk = os.read(self.pipe, 65536)
            if not chunk:
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                self.read(**json.loads(line))
        os.close(self.pipe)
        self.finish(self.process.wait())
        return self.next

    def read(self, i, call=None, faults=0, fault=None, result=None, message=None):
        self.next = i + 1
        self.running = i if call is not None else None
        if call is not None:
            self.outcome.calls[i], self.outcome.faults[i] = call, faults
        elif fault is not None:
            self.faulted = True
            self.outcome.deaths.append(f"{self.outcome.calls[i]}: {fault}")
        else:
            self.outcome.results[i] = result, message

    def finish(self, code):
        self.errors.seek(0)
        text = self.errors.read().decode(errors="replace")[-6000:]
        how = f"{'hung' if self.hung else f'exit code {code}'}\n{text}"
        if self.running is not None:
            self.outcome.deaths.append(f"{self.outcome.calls[self.running]}: {how}")
        elif code != 0 and not self.faulted:
            if self.next == self.first:
                raise RuntimeError(f"the child made no call: {how}")
            last = self.outcome.calls[self.next - 1]
            self.outcome.deaths.append(f"between the calls, after {last}: {how}")


def differing(ours, native):
    """Calls with another exception type than native's, or an error on one side only."""
    return {
        i: (ours.calls[i], result, native.results[i], ours.faults[i])
        for i, result in ours.results.items()
        if native.results.get(i, ("none",))[0] not in ("none", result[0])
    }


# Calls in which native reads memory that the call does not own, by our message.
BEYOND_MEMORY = {
    r"its data is not allocated": "a storage smaller than the sizes need: native reads beyond it",
    r"\bmeta\b": "a meta tensor among others: native reads memory that was never allocated",
}


# Native's message, where a library under it or a kernel fails on a call that is right.
ENGINES = {
    "CUDNN_BACKEND|Expected mha_graph": "cuDNN has no engine for the call",
    "doesn't match the broadcast shape": "native's logsumexp without dims fails on a GPU",
}


# Native's exception, where its own Python code fails on the way to a check of arguments.
STUMBLES = {
    "AssertionError": "an assertion in torch's code for meta tensors; other devices raise IndexError",
    "AttributeError": "a method called on what is no tensor",
}


def reason(ours, native, faults=1):
    """Why an outcome may differ from native's; None if nothing in the list says so."""
    if native[0] in STUMBLES and ours[0] != "ok":
        return STUMBLES[native[0]]
    if faults > 1 and "ok" not in (ours[0], native[0]):
        return "two faults: each side names the one that it meets first"
    if ours[0] == "ok":
        found = (why for text, why in ENGINES.items() if re.search(text, native[1]))
        return next(found, None)
    if re.search("invalid name|got: name|name '.*' not found", native[1], re.IGNORECASE):
        return "named dimensions, which torch's reductions and scans take"
    if native[0] == "ok" or re.search("data is not allocated", ours[1]):
        return next((why for text, why in BEYOND_MEMORY.items() if re.search(text, ours[1])), None)
    return None


def unexplained(ours, native):
    """What differs for no known reason: {number: (call, our outcome, native's, faults)}."""
    different = differing(ours, native)
    return {i: found for i, found in different.items() if reason(*found[1:]) is None}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    defaults = Campaign()
    parser.add_argument("--kind", choices=["public", "raw"], default=defaults.kind)
    parser.add_argument("--device", default=defaults.device)
    parser.add_argument("--first", type=int, default=defaults.first)
    parser.add_argument("--calls", type=int, default=defaults.calls)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--only", default=defaults.only, help="regular expression of names")
    parser.add_argument("--no-limit-memory", dest="limit_memory", action="store_false")
    parser.add_argument("--no-native", dest="compare", action="store_false")
    options = vars(parser.parse_args())
    compare = options.pop("compare")
    campaign = Campaign(**options)
    ours = run_campaign(campaign)
    print(f"{len(ours.calls)} calls, {len(ours.deaths)} deaths")
    print(Counter(result for result, _ in ours.results.values()))
    for death in ours.deaths:
        print("DEATH", death)
    if campaign.kind == "public" and compare:
        native = run_campaign(replace(campaign, native=True))
        different = differing(ours, native)
        compared = [i for i in ours.results if native.results.get(i, ("none",))[0] != "none"]
        left = unexplained(ours, native)
        print(f"native: {len(native.deaths)} deaths; {len(different)} of {len(compared)} differ")
        print(Counter(reason(*found[1:]) for found in different.values()))
        print(f"{1 - len(left) / len(compared):.2%} as native, but for these reasons")
        for i, (call, mine, theirs, _) in left.items():
            print(f"{i} {call}\n    ours   {mine}\n    native {theirs}")
    return len(ours.deaths)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Campaign(**json.loads(sys.argv[3])), int(sys.argv[2]))
    else:
        sys.exit(main())

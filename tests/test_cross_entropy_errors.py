"""cross_entropy refuses what native refuses, and labels that are no class: at once on a CPU, later on a GPU."""

import pytest
import torch

import warpwright
import warpwright.functional as F

native = torch.nn.functional.cross_entropy


def bad_calls(device):
    x = torch.randn(4, 5, device=device)
    y = torch.tensor([0, 1, 2, 3], device=device)
    q = torch.rand(4, 5, device=device)
    image = torch.randn(2, 3, 4, 5, device=device)

    def long(*shape):
        return torch.zeros(shape, dtype=torch.long, device=device)

    w = torch.ones(5, device=device)
    yield (x, y[:3]), {}
    yield (x, y[0]), {}
    yield (x, y.int()), {}
    yield (x, y.bool()), {}
    yield (x, q.double()[:, 0]), {}
    yield (x, torch.ones(4, 5, dtype=torch.long, device=device)), {}
    yield (x[0], y[:2]), {}
    yield (x, torch.rand(4, 6, device=device)), {}
    yield (x, long(4, 2)), {}
    yield (image, long(2, 4, 6)), {}
    yield (image, long(2, 4)), {}
    yield (image, long(3, 4, 5)), {}
    yield (image[..., 0], long(2, 5)), {}
    yield (x, y, torch.ones(4, device=device)), {}
    yield (x, y, torch.ones(5, 1, device=device)), {}
    yield (x, q, torch.ones(4, device=device)), {}
    yield (x, y, w.double()), {}
    yield (x, y, w.long()), {}
    yield (x, y, w.requires_grad_()), {}
    yield (x.half(), y, w.detach()), {}
    yield (x.long(), y), {}
    yield (x.to(torch.complex64), y), {}
    yield (x, y), {"label_smoothing": 1.5}
    yield (x, q), {"label_smoothing": 1.5}
    yield (x, q), {"ignore_index": 1}
    yield (x, y), {"reduction": "average"}
    yield (torch.tensor(1.0, device=device), torch.tensor(0, device=device)), {}
    yield (torch.tensor(1.0, device=device), torch.tensor(0.0, device=device)), {}


def error_of(function, args, kwargs):
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError) as error:
        return type(error)
    raise AssertionError(f"{function} took {args} {kwargs}")


def test_bad_input(device):
    for args, kwargs in bad_calls(device):
        error, expected = error_of(F.cross_entropy, args, kwargs), error_of(native, args, kwargs)
        what = [(tuple(t.shape), t.dtype) for t in args]
        assert error is expected, f"{error}, native {expected}: {what} {kwargs}"


def test_messages(device):
    x = torch.randn(4, 5, device=device)
    y = torch.tensor([0, 1, 2, 3], device=device)
    with pytest.raises(
        ValueError, match=r"Expected input batch_size \(4\) to match target batch_size \(3\)"
    ):
        F.cross_entropy(x, y[:3])
    with pytest.raises(RuntimeError, match=r"0D or 1D target tensor expected, .*, got 2D"):
        F.cross_entropy(x, y[:, None])
    with pytest.raises(
        RuntimeError, match="weight tensor should be defined either for all 5 classes"
    ):
        F.cross_entropy(x, y, torch.ones(4, device=device))
    with pytest.raises(RuntimeError, match="expected scalar type Long but found Int"):
        F.cross_entropy(x, y.int())
    with pytest.raises(RuntimeError, match="Expected floating point type for target with class"):
        F.cross_entropy(x, torch.ones(4, 5, dtype=torch.long, device=device))
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
        F.cross_entropy(x, y, torch.ones(5, device=device, requires_grad=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.uint8, torch.int64], ids=str)
def test_bad_label_among_many_rows(kind):
    warpwright.check_errors()
    x = torch.randn(101400, 200, device="cuda")
    target = torch.randint(200, x.shape[:1], device="cuda").to(kind)
    target[777] = 200
    loss = F.cross_entropy(x, target, reduction="none")
    assert loss.isnan().nonzero().flatten().tolist() == [777]
    with pytest.raises(IndexError, match=r"cross_entropy: Target 200 .*row 777 "):
        warpwright.check_errors()


@pytest.mark.parametrize("label", [5, -1, -101, 2**40, -(2**63)])
def test_bad_label_cpu(label):
    x = torch.randn(3, 5, requires_grad=True)
    target = torch.tensor([1, label, 2])
    for kwargs in ({}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"weight": torch.ones(5)}):
        with pytest.raises(IndexError, match=f"Target {label} is out of bounds."):
            F.cross_entropy(x, target, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("label", [5, -1, -101, 2**40, -(2**63)])
def test_bad_label_cuda(label):
    """NaN in that row alone, an error by name, and the next call works."""
    warpwright.check_errors()
    clean = torch.randn(3, 5, device="cuda")
    target = torch.tensor([1, label, 2], device="cuda")
    for x in (clean, clean.t().contiguous().t()):
        for kwargs in ({}, {"label_smoothing": 0.1}, {"weight": torch.ones(5, device="cuda")}):
            x = x.detach().requires_grad_()
            loss = F.cross_entropy(x, target, reduction="none", **kwargs)
            (grad,) = torch.autograd.grad(loss.sum(), x)
            assert loss.isnan().tolist() == [False, True, False]
            assert grad.isnan().all(1).tolist() == [False, True, False]
            with pytest.raises(IndexError, match=rf"cross_entropy: Target {label} .*row 1 "):
                warpwright.check_errors()
            warpwright.check_errors()
            assert F.cross_entropy(x, target, **kwargs).isnan()
            with pytest.raises(IndexError, match="cross_entropy"):
                warpwright.check_errors()
    assert F.cross_entropy(clean, target.clamp(0, 4)).isfinite()
    warpwright.check_errors()


@pytest.mark.gpu
def test_strict_cuda():
    x = torch.randn(3, 5, device="cuda")
    bad = torch.tensor([1, 9, 2], device="cuda")
    with warpwright.strict(), pytest.raises(IndexError, match="Target 9"):
        F.cross_entropy(x, bad)
    assert F.cross_entropy(x, bad).isnan()
    with pytest.raises(IndexError, match="Target 9"):
        warpwright.check_errors()


def test_strict_restores():
    assert not warpwright._C.is_strict()
    with warpwright.strict():
        assert warpwright._C.is_strict()
        with warpwright.strict(False):
            assert not warpwright._C.is_strict()
        assert warpwright._C.is_strict()
    assert not warpwright._C.is_strict()
    warpwright.check_errors()

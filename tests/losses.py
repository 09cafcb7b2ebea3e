"""cross_entropy's operands, and the loss with native's arguments and its own by the formula."""

import torch

native = torch.nn.functional.cross_entropy
# (z_loss, softcap); softcaps of the size of the logits, so that both ends of tanh are seen.
EXTRAS = [(0.0, 0.0), (0.05, 0.0), (0.0, 3.0), (1.0, 3.0)]


def formula(x, target, weight=None, reduction="mean", smoothing=0.0, z_loss=0.0, softcap=0.0):
    """The docstring's, in differentiable torch ops."""
    s = softcap * torch.tanh(x / softcap) if softcap else x
    lse = s.logsumexp(1)
    loss = native(s, target, weight, reduction="none", label_smoothing=smoothing)
    if target.is_floating_point():
        return _reduced(loss + z_loss * lse**2, torch.ones_like(loss).sum(), reduction), lse
    counted = target != -100
    w = torch.ones_like(loss) if weight is None else weight[target.clamp(0)]
    return _reduced(loss + z_loss * lse**2 * counted, (w * counted).sum(), reduction), lse


def _reduced(loss, total, reduction):
    if reduction == "none":
        return loss
    return loss.sum() / total if reduction == "mean" else loss.sum()


REDUCTIONS = ["none", "mean", "sum"]


def label_shape(shape):
    return (shape[0], *shape[2:]) if len(shape) > 1 else ()


def labels_for(shape, device, ignore=-100):
    """Random labels, a fifth of them (not the first) ignored."""
    classes = shape[1] if len(shape) > 1 else shape[0]
    labels = torch.randint(classes, label_shape(shape), device=device)
    ignored = torch.rand(labels.shape, device=device) < 0.2
    if labels.dim():
        ignored[:1] = False
        labels[ignored] = ignore
    return labels


def weights_for(shape, device, dtype):
    classes = shape[1] if len(shape) > 1 else shape[0]
    return (torch.rand(classes, device=device) + 0.5).to(dtype)

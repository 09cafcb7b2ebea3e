"""Optimizers whose step is one pass over memory.

They are subclasses of `torch.optim`'s classes, with the same arguments, defaults, `state_dict` and
`param_groups`. The extra arguments are keyword-only, and none of them is in `param_groups`:

- ``max_norm``: clip all gradients of the optimizer by their global 2-norm, as
  ``torch.nn.utils.clip_grad_norm_`` does. The step writes no clipped gradients and does not wait for
  the GPU. ``.grad`` stays unclipped; ``optimizer.grad_norm`` is the last step's norm, on the device.
- ``zero_grad_in_step``: set the gradients to zero in the step (``zero_grad(set_to_none=False)``).
- ``state_dtype=torch.float32``: float32 state for bfloat16 and float16 parameters.
- ``master_weights``: a float32 copy of bfloat16 and float16 parameters (``state["master_param"]``)
  and float32 state. The parameter is the rounded copy.
- ``weight_copies``: for float32 parameters under autocast. The step writes a bfloat16 or float16
  copy of each weight and bias that warpwright's linear layers and convolutions have cast. The next
  forward reads the copy instead of casting again. A copy counts as stale once the parameter's version
  counter moves, as by ``load_state_dict`` or ``copy_``. Writes through ``.data`` move no counter, so
  don't use it where a program does that. A copy costs two bytes per value as long as the optimizer
  lives. As with float32 weights outside autocast, a backward through a forward from before the step
  raises. A CUDA graph reads copies only under :func:`warpwright.graph_step`.

The constructors raise ``ValueError`` for a negative or NaN ``max_norm``, another ``state_dtype``, or
an extra together with ``differentiable=True``. With ``max_norm`` the step raises
``NotImplementedError`` in two cases: gradients that only torch.optim's functions take (sparse, of
another dtype, on another device), and parameters on several devices.
"""

from .adam import Adam, AdamW
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]

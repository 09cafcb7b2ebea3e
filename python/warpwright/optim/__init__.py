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

The constructors raise ``ValueError`` for a negative or NaN ``max_norm``, another ``state_dtype``, or
an extra together with ``differentiable=True``. With ``max_norm`` the step raises
``NotImplementedError`` in two cases: gradients that only torch.optim's functions take (sparse, of
another dtype, on another device), and parameters on several devices.
"""

from .adam import Adam, AdamW
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]

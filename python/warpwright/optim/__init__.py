"""Optimizers whose step is one pass over memory: same arguments, defaults, `state_dict` and
`param_groups` as `torch.optim`, of whose classes they are subclasses.

Keyword-only extras, none of them in `param_groups`:

- ``max_norm``: clip all gradients of the optimizer by their global 2-norm, as
  ``torch.nn.utils.clip_grad_norm_`` does, without a pass that writes them and without waiting for
  the GPU. ``.grad`` itself stays unclipped; ``optimizer.grad_norm`` is the last step's norm, on the
  device.
- ``zero_grad_in_step``: leave zeros in the gradients (``zero_grad(set_to_none=False)``).
- ``state_dtype=torch.float32``: fp32 state beside bf16 and fp16 parameters.
- ``master_weights``: an fp32 copy of bf16 and fp16 parameters (``state["master_param"]``), with
  fp32 state; the parameter is its rounding.

They raise ``ValueError`` for a negative or NaN ``max_norm``, another ``state_dtype``, and beside
``differentiable=True``; with ``max_norm`` the step raises ``NotImplementedError`` for gradients that
torch.optim's own functions must take (sparse, of another type, on another device), and for
parameters on several devices.
"""

from .adam import Adam, AdamW
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]

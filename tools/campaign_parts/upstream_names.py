"""A pytest plugin: names that the test files of older PyTorch releases import, where this torch has
dropped them.
"""

import sys
import types

import torch
from torch.testing._internal import common_cuda, common_mkldnn, common_nn


def tf32_is_not_fp32() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_properties(0).major >= 8


if not hasattr(common_nn, "new_module_tests"):
    common_nn.new_module_tests = common_nn.get_new_module_tests()
if not hasattr(common_cuda, "tf32_is_not_fp32"):
    common_cuda.tf32_is_not_fp32 = tf32_is_not_fp32
if not hasattr(common_mkldnn, "bf32_on_and_off"):
    common_mkldnn.bf32_on_and_off = common_mkldnn.reduced_f32_on_and_off

# test_transformers.py takes its helpers from a test file that builds a made-up device.
made_up = types.ModuleType("test_cpp_extensions_open_device_registration")
made_up.generate_faked_module = lambda: types.ModuleType("foo")
made_up.remove_build_path = lambda: None
sys.modules.setdefault(made_up.__name__, made_up)

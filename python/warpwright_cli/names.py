"""Names that options take, for help and completion without torch; tests/test_cli.py compares them."""

PEERS = (
    "native",
    "channels_last",
    "compile",
    "max-autotune",
    "cudagraph",
    "cudnn-graph",
    "liger",
)
RUNS = ("native", "swapped", "fused", "compiled")
SUITES = ("quick", "full", "model")

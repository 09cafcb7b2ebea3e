"""`python -m warpwright`: the command line, which the package warpwright_cli has."""

import sys

from warpwright_cli import main

if __name__ == "__main__":  # processes that are spawned import this module
    sys.exit(main(prog="python -m warpwright"))

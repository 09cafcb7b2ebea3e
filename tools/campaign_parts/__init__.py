"""The parts of tools/campaign.py. Each has a function `run(options)` that returns rows of the record."""

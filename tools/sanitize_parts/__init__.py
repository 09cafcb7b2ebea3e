"""The cases of tools/sanitize_cases.py, by kind of op."""

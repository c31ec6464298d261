"""`ssm_tune` with blocks that are recorded piece by piece, for tests: `python -m recorded sft ...`."""
